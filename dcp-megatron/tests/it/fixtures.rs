//! Every fixture equals what it should hold.

use std::collections::BTreeSet;

use dcp_core::metadata::Entry;
use dcp_jobs::get::{Found, find};
use dcp_jobs::read::read_objects;
use dcp_jobs::{JobOptions, Source};
use dcp_megatron::disk::{COMMON_OBJECT, COMMON_STATE, CommonPlace};
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions, StoredFormat};

use crate::expected;
use crate::support::{block_on, expected_json, expected_tensors, fixture, stored};

const IN_FILE: StoredFormat = StoredFormat::TorchDist { common: CommonPlace::File };
const INSIDE: StoredFormat = StoredFormat::TorchDist { common: CommonPlace::Inside };

/// What opens as a checkpoint of Megatron-Core: the fixture, and its format.
pub(crate) const OPENED: &[(&str, StoredFormat)] = &[
    ("factories", IN_FILE),
    ("gpt_async", IN_FILE),
    ("gpt_dp2_dp_reshardable", IN_FILE),
    ("gpt_dp2_dp_reshardable_multibucket", IN_FILE),
    ("gpt_dp_zero_gather_scatter", IN_FILE),
    ("gpt_float16_optimizer", IN_FILE),
    ("gpt_fully_reshardable_multibucket_CORRUPT", IN_FILE),
    ("gpt_moe_chained_dp_reshardable", IN_FILE),
    ("gpt_moe_ep2_swiglu", IN_FILE),
    ("gpt_separation_hint", IN_FILE),
    ("gpt_tp2dp2_fully_reshardable", IN_FILE),
    ("gpt_tp2pp2_swiglu", IN_FILE),
    ("head020_basic_integrity", INSIDE),
    ("head020_fully_reshardable_multibucket", INSIDE),
    ("head020_gpt_dp2_dp_reshardable", INSIDE),
    ("objects_grid", IN_FILE),
    ("run_torch_dist_dp2", IN_FILE),
    ("run_torch_dist_v019", INSIDE),
    ("shape_mismatch", IN_FILE),
    ("tp2_basic", IN_FILE),
    ("v012_basic_torch24", IN_FILE),
    ("v015_flattened", IN_FILE),
    ("v015_gpt_tp2dp2_swiglu_fs_model_space", IN_FILE),
    ("v015_moe_singleton", IN_FILE),
    ("v06_basic_torch21", IN_FILE),
    ("v06_zarr", StoredFormat::Zarr),
    ("v09_basic_torch24", IN_FILE),
    ("v09_flattened_torch24", IN_FILE),
    ("v09_gpt_dp2_fs_bucket_space", IN_FILE),
    ("v09_zarr", StoredFormat::Zarr),
];

/// Fixtures that are no checkpoints of `dist_checkpointing`, and what tests them instead.
const OTHERS: &[(&str, &str)] = &[
    ("run_legacy_torch_tp2", "folders of mp_rank_*: their own tests"),
    ("run_torch_dcp", "a checkpoint of PyTorch: `a_run_of_torch_dcp_is_a_checkpoint_of_pytorch`"),
];

#[test]
fn every_fixture_is_looked_at() {
    let covered: BTreeSet<_> =
        OPENED.iter().map(|(name, _)| *name).chain(OTHERS.iter().map(|(name, _)| *name)).collect();
    let there: BTreeSet<_> = std::fs::read_dir(fixture("."))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(there.iter().map(|name| &**name).collect::<BTreeSet<_>>(), covered);
}

#[test]
fn every_fixture_equals_what_is_expected() {
    for (name, format) in OPENED {
        let storage = stored(name);
        let checkpoint =
            block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default()));
        let checkpoint = checkpoint.unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(checkpoint.format(), format, "{name}");
        assert_eq!(checkpoint.warnings(), [""; 0], "{name}");
        tensors(name, checkpoint.source());
        objects(name, &expected_json(name)["common"], checkpoint.source());
        let json = expected_json(name);
        expected::dict(checkpoint.common(), &json["common"], &format!("{name}, common"));
        let content = json["common"].get("content_metadata");
        match (checkpoint.content_metadata(), content) {
            (Some(found), Some(json)) => expected::dict(found, json, "content"),
            (found, json) => assert_eq!((found.is_some(), json), (false, None), "{name}"),
        }
    }
}

/// Every tensor has the dtype, shape and bytes that are expected, and there are no others.
pub(crate) fn tensors(name: &str, source: &Source) {
    let metadata = block_on(source.metadata()).unwrap();
    let mut expected = expected_tensors(name);
    let json = expected_json(name);
    for (fqn, entry) in metadata.iter() {
        let Entry::Tensor(tensor) = entry else { continue };
        let (shape, bytes) = expected.remove(&**fqn).unwrap_or_else(|| panic!("{name}: {fqn}"));
        assert_eq!(*tensor.shape, *shape, "{name}: {fqn}");
        assert_eq!(json["tensors"][&**fqn]["dtype"], tensor.dtype.name(), "{name}: {fqn}");
        let Found::Tensor(found) = block_on(find(source, fqn, None)).unwrap() else { panic!() };
        assert!(block_on(found.read()).unwrap() == bytes, "{name}: {fqn}");
    }
    assert!(expected.is_empty(), "{name}: {:?}", expected.keys());
}

/// Every object is what is expected, a list of one, and there are no others but the common state.
pub(crate) fn objects(name: &str, common_expected: &serde_json::Value, source: &Source) {
    let metadata = block_on(source.metadata()).unwrap();
    let entries: Vec<usize> = (0..metadata.len())
        .filter(|at| metadata.at(*at).is_some_and(|(_, entry)| entry.as_object().is_some()))
        .collect();
    let mut values = block_on(read_objects(source, &metadata, &entries));
    let json = expected_json(name);
    let mut expected = json["objects"].as_object().unwrap().clone();
    let (mut common, mut checked) = (None, 0);
    for entry in entries {
        let fqn = metadata.at(entry).unwrap().0;
        let value = values.remove(&entry).unwrap().unwrap();
        if &**fqn == COMMON_STATE {
            common = Some(value);
            continue;
        }
        let mut json = expected.remove(&*as_named(name, fqn));
        if name.ends_with("_zarr") {
            // There an object's file holds it as it is.
            json = json.map(|json| vec![json].into());
        }
        let json = json.unwrap_or_else(|| panic!("{name}: {fqn}"));
        expected::check(&value, &json, &format!("{name}: {fqn}"));
        checked += 1;
    }
    expected.remove(COMMON_OBJECT);
    assert!(expected.is_empty(), "{name}: {:?}, {checked} were there", expected.keys());
    expected::check(&common.unwrap(), common_expected, &format!("{name}: {COMMON_STATE}"));
}

/// The name that the file of an object has, where it is not its unique key: Megatron-Core 0.6 left
/// out the last axis of the grid.
fn as_named(fixture: &str, unique_key: &str) -> String {
    match (fixture, unique_key.rsplit_once('.')) {
        ("v06_zarr", Some((short, _))) if unique_key.starts_with("rng_state/") => short.to_owned(),
        _ => unique_key.to_owned(),
    }
}

#[test]
fn a_run_of_torch_dcp_is_a_checkpoint_of_pytorch() {
    let storage = stored("run_torch_dcp");
    let folder =
        dcp_core::format::Subfolder::new(storage, dcp_core::Key::new("iter_0000010").unwrap());
    let source = block_on(Source::open(&(std::sync::Arc::new(folder) as _), false)).unwrap();
    tensors("run_torch_dcp", &source);
    let report = block_on(dcp_jobs::verify::verify(&source, true, &JobOptions::default())).unwrap();
    assert_eq!(report.problems, []);
}
