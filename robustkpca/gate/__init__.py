"""The regression check and what CI systems read of it."""
