"""PURE: from the picture to metric families."""
