"""Parts of a model that several ranks compute together: which, their layers, and sums in a fixed order."""
