//! Replays the seeds of the fuzz targets, whole, cut short, and damaged: nothing may panic, hang,
//! or claim more memory than the input accounts for.

#[path = "support/targets.rs"]
mod targets;
#[path = "support/torch_save_target.rs"]
mod torch_save_target;

use std::path::Path;

fn replay(target: &str, run: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let mut seeds = 0;
    for file in std::fs::read_dir(dir).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        run(&bytes);
        let step = (bytes.len() / 200).max(1);
        for len in (0..bytes.len()).step_by(step) {
            run(&bytes[..len]);
        }
        let mut damaged = bytes.clone();
        for at in (0..bytes.len()).step_by(step) {
            for bit in [at % 8, (at + 5) % 8] {
                damaged[at] ^= 1 << bit;
                run(&damaged);
                damaged[at] = bytes[at];
            }
        }
        seeds += 1;
    }
    assert!(seeds >= 8, "{target} has {seeds} seeds");
}

#[test]
fn pickles() {
    replay("pickle", targets::pickle);
}

#[test]
fn archives() {
    replay("torch_zip", targets::torch_zip);
}

#[test]
fn indexes() {
    replay("metadata", targets::metadata);
}

#[test]
fn folders() {
    replay("folder", targets::folder);
}

#[test]
fn tensors() {
    replay("tensor_blob", targets::tensor_blob);
}

#[test]
fn objects() {
    replay("object_blob", targets::object_blob);
}

#[test]
fn safetensors_headers() {
    replay("safetensors", targets::safetensors);
}

#[test]
fn zarr_headers() {
    replay("zarr", targets::zarr);
}

#[test]
fn plans_on_the_wire() {
    replay("plan_wire", targets::plan_wire);
}

#[test]
fn sidecars() {
    replay("sidecar", targets::sidecar);
}

#[test]
fn indexes_of_models() {
    replay("hf_index", targets::hf_index);
}

#[test]
fn pickles_written_again() {
    replay("pickle", targets::pickle_rewrite);
    replay("pickle_rewrite", targets::pickle_rewrite);
}

#[test]
fn torch_save_files() {
    replay("torch_save", torch_save_target::torch_save);
}
