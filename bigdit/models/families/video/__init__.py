"""The families of video, a file each, as those beside this folder."""
