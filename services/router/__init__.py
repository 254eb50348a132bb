"""The router: takes requests, places both phases, streams the answers. It holds no tensor and imports no torch."""
