"""kubernetes_schemas.py FILE...: compares manifests with the schemas of Kubernetes, and JobSets with
those of Kubeflow Trainer's API, which has them generated from JobSet's own.

Unknown fields are errors. A manifest that has none of the schemas is an error, too.
"""
import sys

import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from kubernetes_validate import ValidationError, latest_version, validate


def unknown(given, understood, path):
    """The paths of what `given` has and `understood` lacks."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for key, value in given.items():
            below = "%s.%s" % (path, key)
            if key not in understood:
                yield below
            else:
                yield from unknown(value, understood[key], below)
    elif isinstance(given, list) and isinstance(understood, list):
        for at, (value, other) in enumerate(zip(given, understood)):
            yield from unknown(value, other, "%s[%d]" % (path, at))


def check(manifest):
    """Yields what is compared with a schema, or raises."""
    if manifest["kind"] != "JobSet":
        yield "%s of Kubernetes %s" % (manifest["kind"], validate(manifest, latest_version(), strict=True))
        return
    version = JobsetV1alpha2JobSet.__module__.rpartition(".")[2].split("_")[1]
    if manifest["apiVersion"] != "jobset.x-k8s.io/" + version:
        raise ValueError("there is a schema of jobset.x-k8s.io/%s only" % version)
    understood = JobsetV1alpha2JobSet.from_dict(manifest).to_dict()
    fields = list(unknown(manifest, understood, "JobSet"))
    if fields:
        raise ValueError("no field of a JobSet: " + ", ".join(fields))
    yield "JobSet " + version
    for job in manifest["spec"]["replicatedJobs"]:
        # The schemas of Kubernetes are stricter than those generated from them.
        of_template = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        yield from check({**of_template, "spec": job["template"]["spec"]})


def main():
    failed = 0
    for name in sys.argv[1:]:
        with open(name) as file:
            for manifest in filter(None, yaml.safe_load_all(file)):
                try:
                    print("%s: %s" % (name, ", ".join(check(manifest))))
                except (ValidationError, ValueError) as error:
                    path = ".".join(map(str, getattr(error, "path", ())))
                    message = getattr(error, "message", None) or error
                    print("%s: %s %s: %s" % (name, manifest["kind"], path, message), file=sys.stderr)
                    failed += 1
    sys.exit(1 if failed else 0)


main()
