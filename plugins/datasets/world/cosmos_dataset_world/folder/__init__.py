"""`world-folder`: a local folder of captions and videos."""
