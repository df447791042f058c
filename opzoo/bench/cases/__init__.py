"""One module per operator. Each has ``cases(device_type)``, ``quick()`` and ``tiny()``, all returning lists of Case."""
