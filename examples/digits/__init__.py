"""A small two-stage detector of handwritten digits, built on opzoo's operators. See ``../detect_digits.py``."""
