"""The benchmark: ``python -m opzoo.bench``. No number appears that did not pass its correctness gate in the same run."""
