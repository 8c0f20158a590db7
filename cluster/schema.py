"""Writes the JSON schema of cluster.yaml for editors: python -m cluster.schema > FILE."""

import json

from cluster.settings import Cluster

if __name__ == "__main__":
    print(json.dumps(Cluster.model_json_schema(), indent=2))
