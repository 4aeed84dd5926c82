"""Tensor parallel: the ranks of one worker, each with a shard of every layer."""
