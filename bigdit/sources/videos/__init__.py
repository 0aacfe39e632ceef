"""Videos as files, animations and folders of frames: which of their frames are taken, and how many clips."""
