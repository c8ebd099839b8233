"""Why a run failed: rules (data), what they match in logs, and the verdict."""
