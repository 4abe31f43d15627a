"""Decisions as they were made: remembered, recorded, replayed."""
