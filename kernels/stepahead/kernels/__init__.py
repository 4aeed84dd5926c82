"""Arrays in, arrays out: the operations of a decoder step."""
