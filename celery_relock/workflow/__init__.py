"""`locked(canvas, key=…)`: one permit for a whole workflow."""
