"""The operators. Import them from :mod:`opzoo`."""
