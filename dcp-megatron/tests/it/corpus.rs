//! Replays the seeds of the fuzz targets `megatron_files`, `megatron_common` and `megatron_commit`,
//! whole, cut short, and damaged.

use std::path::Path;

use dcp_core::Value;
use dcp_core::value::{Dict, Global, Object};
use dcp_formats::pickle::dump;
use dcp_megatron::parallel::CachedDistribution;

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

#[test]
fn cached_distributions_never_do_more_than_fail() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/cached_distribution");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let bytes = std::fs::read(seed.unwrap().path()).unwrap();
        for at in 0..bytes.len() {
            targets::cached_distribution(&bytes[..at]);
            for bit in 0..8 {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                targets::cached_distribution(&damaged);
            }
        }
        targets::cached_distribution(&bytes);
        count += 1;
    }
    assert!(count >= 8, "{count} seeds");
}

/// The seeds are of the form that is written and read.
#[test]
fn seeds_of_cached_distributions_are_whole() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/cached_distribution");
    let read = |name: &str| std::fs::read(seeds.join(name)).unwrap();
    let (lens, file) = ([3, 0, 9], read("whole"));
    let known = CachedDistribution::parse(&file[3..], &lens).unwrap();
    assert_eq!((known.group, &*known.owned[0]), ([7; 16], &[true, false, true][..]));
    assert_eq!(known.to_bytes(), file[3..]);
    assert!(CachedDistribution::parse(&read("flipped")[3..], &lens).is_err());
}

#[test]
fn common_states_never_do_more_than_fail() {
    let number = |name: &str, value: i64| (name.to_owned(), Value::Int(value));
    let mut args = Object::new(Global::new("argparse", "Namespace"), Vec::new());
    let sizes = [number("tensor_model_parallel_size", 2), number("num_layers", 1 << 40)];
    args.state = Some(Dict::from(sizes).into());
    let content = Dict::from([number("distrib_optim_sharding_type", 1)]);
    let common = Dict::from([
        ("args".to_owned(), Value::Object(Box::new(args))),
        number("iteration", 7),
        ("content_metadata".to_owned(), content.into()),
    ]);
    let bytes = dump(&common.into()).unwrap();
    targets::common_state(&bytes);
    for at in 0..bytes.len() {
        targets::common_state(&bytes[..at]);
        let mut damaged = bytes.to_vec();
        damaged[at] ^= 1 << (at % 8);
        targets::common_state(&damaged);
    }
}

#[test]
fn records_of_overwrites_never_do_more_than_fail() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/commit");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let mut bytes = std::fs::read(seed.unwrap().path()).unwrap();
        targets::commit_record(&bytes);
        for at in 0..bytes.len() {
            targets::commit_record(&bytes[..at]);
            bytes[at] ^= 1 << (at % 8);
            targets::commit_record(&bytes);
            bytes[at] ^= 1 << (at % 8);
        }
        count += 1;
    }
    assert!(count >= 4, "{count} seeds");
}
