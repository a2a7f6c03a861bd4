"""Measuring, comparing and predicting training."""
