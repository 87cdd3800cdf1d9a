"""From a plan and a live model to a step that runs as the plan says.
Not for decisions: what a plan leaves open is an error here."""
