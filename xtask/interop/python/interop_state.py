"""interop_state.py FILE: writes the state dict that Rust is to save, as JSON."""
import json

import interop_common as common


def write(path):
    with open(path, "w") as file:
        json.dump(common.state(), file, indent=1)


if __name__ == "__main__":
    common.main(write)
