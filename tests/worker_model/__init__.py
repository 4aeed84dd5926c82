"""Models and toys, driven through the runner seam."""
