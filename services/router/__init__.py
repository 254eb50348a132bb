"""Has the router, which takes requests, places both phases and streams the answers.

It holds no tensor and imports no torch.
"""
