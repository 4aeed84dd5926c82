"""Models: configuration, weights, tokenizer and the decoder that runs them."""
