"""Tree speculative decoding: draft, build, verify, accept, commit (arXiv 2606.18394, section 4)."""
