"""The way back measured: from a lost process or machine to the next new step."""
