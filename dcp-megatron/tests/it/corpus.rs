//! Replays the seeds of the fuzz target `megatron_files`, whole, cut short, and damaged.

use std::path::Path;

use crate::targets;

#[test]
fn small_files_never_do_more_than_fail() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/small_files");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let bytes = std::fs::read(seed.unwrap().path()).unwrap();
        targets::small_files(&bytes);
        for at in 0..bytes.len() {
            targets::small_files(&bytes[..at]);
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                targets::small_files(&damaged);
            }
        }
        count += 1;
    }
    assert!(count >= 8, "{count} seeds");
}
