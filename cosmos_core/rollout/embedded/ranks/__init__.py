"""The processes of an embedded engine whose model is split over `tp`: one that leads, and those that follow it."""
