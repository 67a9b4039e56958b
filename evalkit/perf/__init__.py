"""What policies cost and buy in seconds and memory: time to first token, batches, decoding; knows no task and no accuracy."""
