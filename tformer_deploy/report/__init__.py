"""The pages of `check` and `bench`: one HTML file each, without scripts and network. Needs the extra `report`."""
