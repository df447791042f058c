"""The benchmark: ``python -m opzoo.bench``. What did not pass its correctness gate gets no number."""
