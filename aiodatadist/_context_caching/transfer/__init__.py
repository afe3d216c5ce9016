"""Movement of values between the caller's memory and a pool."""
