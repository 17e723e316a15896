//! Known weaknesses of Megatron-Core's format, by their numbers, where no other test has them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use dcp_conformance::MemoryStorage;
use dcp_core::metadata::Entry;
use dcp_core::storage::StorageExt as _;
use dcp_core::{Collective, CollectiveError, DType, FormatError, Key, Rank, Storage, Value};
use dcp_formats::metadata::Profile;
use dcp_formats::pickle::Writer;
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use dcp_jobs::JobOptions;
use dcp_jobs::reshard::reshard;
use dcp_jobs::verify::verify;
use dcp_megatron::parallel::{DistributionOrigin, ParallelSave};
use dcp_megatron::sharded::{LocalTensor, ObjectKey, ShardedObject, ShardedTensor};
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions, MegatronWriter};

use crate::fixtures::{OPENED, tensors};
use crate::ranks::on_boxed_ranks;
use crate::support::{block_on, copy, expected_json, get, names, put, stored};

fn open(storage: &Arc<dyn Storage>) -> MegatronCheckpoint {
    block_on(MegatronCheckpoint::open(storage, &MegatronOpenOptions::default())).unwrap()
}

fn save_again(checkpoint: &MegatronCheckpoint) -> Arc<dyn Storage> {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    let writer = MegatronWriter::builder(Arc::clone(&storage))
        .common(checkpoint.common_value().clone())
        .build();
    let raw = checkpoint.raw().unwrap();
    block_on(reshard(raw, &writer, 2, &JobOptions::default())).unwrap();
    storage
}

/// Trap 2: a common state whose pickle would run a program, with an enum of Megatron's and arrays
/// under the names of NumPy 1 and 2.
#[test]
fn trap_02_pickles_are_data_whatever_they_call() {
    let mut writer = Writer::new();
    type Written = Result<(), FormatError>;
    let entry = |writer: &mut Writer, which: &str| -> Written {
        writer.str(which);
        match which {
            "iteration" => writer.int(7),
            "attack" => {
                writer.global("posix", "system");
                writer.tuple(1, |writer| -> Written {
                    writer.str("touch executed");
                    Ok(())
                })?;
                writer.call();
            }
            "backend" => {
                writer.global("megatron.core.transformer.enums", "AttnBackend");
                writer.tuple(1, |writer| -> Written {
                    writer.int(5);
                    Ok(())
                })?;
                writer.call();
            }
            numpy => {
                writer.global(&format!("{numpy}.multiarray"), "scalar");
                writer.tuple(2, |writer| -> Written {
                    writer.global("numpy", "dtype");
                    writer.tuple(1, |writer| -> Written {
                        writer.str("i8");
                        Ok(())
                    })?;
                    writer.call();
                    writer.bytes(&3_i64.to_le_bytes());
                    Ok(())
                })?;
                writer.call();
            }
        }
        Ok(())
    };
    let all = ["iteration", "attack", "backend", "numpy.core", "numpy._core"];
    writer.dict(all.into_iter(), |writer, which| entry(writer, which)).unwrap();
    let pickle = writer.finish().unwrap();
    let archive = ArchiveEncoder::encode(RecordSet::default(), pickle, &[]).unwrap();

    let storage: Arc<dyn Storage> = copy(&*stored("tp2_basic"));
    put(&*storage, "common.pt", archive.to_vec());
    let checkpoint = open(&storage);
    let common = checkpoint.common();
    assert_eq!(common.get("iteration").and_then(Value::as_int), Some(7));
    assert_eq!(common.len(), 5);
    let shown = format!("{:?}", common.get("attack").unwrap());
    assert!(shown.contains("posix") && shown.contains("system"), "{shown}");
    assert!(!std::path::Path::new("executed").exists());
    tensors("tp2_basic", checkpoint.source());
    // It can be saved again as it was: names, not what they would do.
    let again = save_again(&checkpoint);
    assert_eq!(open(&again).common().len(), 5);
}

/// Trap 3: hints of Megatron-Core 0.15 and later start at 0 on each rank, so the same one is used
/// to several chunks of a tensor; and several chunks lie in one file.
#[test]
fn trap_03_chunks_are_told_apart_by_their_offsets() {
    let name = "gpt_dp2_dp_reshardable";
    let json = expected_json(name);
    let mut hints: BTreeMap<(&str, u64), u32> = BTreeMap::new();
    for row in json["storage"].as_array().unwrap() {
        if let Some(hint) = row[2].as_u64() {
            *hints.entry((row[0].as_str().unwrap(), hint)).or_default() += 1;
        }
    }
    assert!(hints.values().any(|count| *count > 1), "hints repeat");
    let checkpoint = open(&stored(name));
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let mut in_one_file = false;
    for (fqn, entry) in metadata.iter() {
        let Entry::Tensor(tensor) = entry else { continue };
        let offsets: BTreeSet<_> = tensor.chunks.iter().map(|c| c.offsets.to_vec()).collect();
        assert_eq!(offsets.len(), tensor.chunks.len(), "{fqn}");
        let files: BTreeSet<_> = tensor.chunks.iter().map(|c| c.placement.unwrap().file).collect();
        in_one_file |= files.len() < tensor.chunks.len();
    }
    assert!(in_one_file);
    tensors(name, checkpoint.source());
    // Written again, on other ranks, they are the same.
    tensors(name, open(&save_again(&checkpoint)).source());
}

/// Trap 5: Megatron-Core from 0.16 on takes the stored shape for the real one.
#[test]
fn trap_05_tensors_that_were_stored_flattened_have_their_logical_shape() {
    let mut flattened = 0;
    for name in ["v015_flattened", "v09_flattened_torch24", "v015_gpt_tp2dp2_swiglu_fs_model_space"]
    {
        let json = expected_json(name);
        let checkpoint = open(&stored(name));
        let metadata = block_on(checkpoint.source().metadata()).unwrap();
        for (fqn, info) in json["tensor_info"].as_object().unwrap() {
            let logical = &json["tensors"][fqn]["shape"];
            if &info["stored_shape"] != logical {
                flattened += 1;
                let shape = &metadata.get(fqn).unwrap().as_tensor().unwrap().shape;
                assert_eq!(serde_json::json!(shape.to_vec()), *logical, "{name}: {fqn}");
            }
        }
        tensors(name, checkpoint.source());
    }
    assert!(flattened > 10, "{flattened}");
}

/// Trap 6: keys are parts of names, unescaped.
#[test]
fn trap_06_keys_with_slashes_are_refused_and_spaces_and_parentheses_are_not() {
    assert!(ShardedObject::single("model/state", 1).is_err());
    let odd = "optimizer.dtype_(torch.bfloat16, torch.float32).shard_1_2";
    let object = ShardedObject::new(odd, 1, [2, 3], [1, 2]).unwrap();
    let parsed = ObjectKey::parse(&object.unique_key()).unwrap();
    assert_eq!((&**parsed.key(), &parsed), (odd, object.at()));
    let name = "gpt_dp2_dp_reshardable_multibucket";
    let checkpoint = open(&stored(name));
    let metadata = block_on(checkpoint.source().metadata()).unwrap();
    let is_odd = |fqn: &Arc<str>| fqn.contains("(torch.") && fqn.contains(", ");
    assert!(metadata.iter().any(|(fqn, _)| is_odd(fqn)));
    let again = open(&save_again(&checkpoint));
    let saved = block_on(again.source().metadata()).unwrap();
    let keys = |metadata: &dcp_core::CheckpointMetadata| -> BTreeSet<String> {
        metadata.iter().map(|(fqn, _)| fqn.to_string()).collect()
    };
    assert_eq!(keys(&saved), keys(&metadata));
    let odd_file = |file: &String| file.contains('(') || file.contains(' ');
    assert!(!names(&**again.storage()).iter().any(odd_file), "no key becomes a file name");
}

/// Trap 8: Megatron's `.metadata` has the path of the save and a random id in it.
#[test]
fn trap_08_the_same_checkpoint_is_the_same_bytes_and_tells_no_paths() {
    let checkpoint = open(&stored("tp2_basic"));
    let theirs = block_on(checkpoint.raw().unwrap().metadata()).unwrap();
    let path = theirs.provenance().checkpoint_id.clone().unwrap();
    let [left, right] = [save_again(&checkpoint), save_again(&checkpoint)];
    assert_eq!(names(&*left), names(&*right));
    for name in names(&*left) {
        let bytes = get(&*left, &name).unwrap();
        assert_eq!(Some(&bytes), get(&*right, &name).as_ref(), "{name}");
        assert!(!bytes.windows(path.len()).any(|window| window == path.as_bytes()), "{name}");
    }
    let ours = block_on(open(&left).raw().unwrap().metadata()).unwrap();
    assert_eq!(ours.provenance().checkpoint_id, None);
    assert_eq!(ours.provenance().save_id, None);
}

/// Where the first record after `from` whose name ends like this has its first byte.
fn first_byte(bytes: &[u8], from: usize, name: &str) -> usize {
    let number = |at: usize| usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    let mut records = (from..).filter(|at| bytes[*at..].starts_with(b"PK\x03\x04"));
    let named = |at: &usize| {
        let name_end = at + 30 + number(at + 26);
        bytes[at + 30..name_end].ends_with(name.as_bytes())
    };
    let record = records.find(named).unwrap();
    record + 30 + number(record + 26) + number(record + 28)
}

/// Trap 9: the checksums of the archives in the files are there, but nobody compares them.
#[test]
fn trap_09_a_flipped_bit_of_any_tensor_or_object_is_found() {
    let original = stored("tp2_basic");
    let deep = |storage: &Arc<dyn Storage>| {
        let checkpoint = open(storage);
        block_on(verify(checkpoint.raw().unwrap(), true, &JobOptions::default())).unwrap().problems
    };
    assert_eq!(deep(&original).len(), 0);
    let metadata = block_on(open(&original).raw().unwrap().metadata()).unwrap();
    let mut tried = 0;
    for (fqn, entry) in metadata.iter() {
        let placement = match entry {
            Entry::Tensor(tensor) => tensor.chunks.get(0).unwrap().placement.unwrap(),
            Entry::Object(object) => object.placement.unwrap(),
            _ => continue,
        };
        let file = metadata.file(placement.file).unwrap().to_string();
        let mut bytes = get(&*original, &file).unwrap();
        let record = if matches!(entry, Entry::Tensor(_)) { "/data/0" } else { "/data.pkl" };
        let at = first_byte(&bytes, usize::try_from(placement.byte_offset).unwrap(), record);
        bytes[at] ^= 1;
        let damaged: Arc<dyn Storage> = copy(&*original);
        put(&*damaged, &file, bytes);
        let problems = deep(&damaged);
        assert!(!problems.is_empty(), "{fqn} at byte {at} of {file}");
        tried += 1;
    }
    assert!(tried > 10);
}

/// Counts what a rank sends.
#[derive(Debug)]
struct Metered {
    inner: Box<dyn Collective>,
    sent: Arc<AtomicU64>,
}

impl Metered {
    fn count(&self, bytes: &Bytes) {
        self.sent.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    }
}

impl Collective for Metered {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world_size(&self) -> u32 {
        self.inner.world_size()
    }

    fn gather(&self, root: Rank, mine: Bytes) -> Result<Option<Vec<Bytes>>, CollectiveError> {
        self.count(&mine);
        self.inner.gather(root, mine)
    }

    fn scatter(&self, root: Rank, all: Option<Vec<Bytes>>) -> Result<Bytes, CollectiveError> {
        all.iter().flatten().for_each(|bytes| self.count(bytes));
        self.inner.scatter(root, all)
    }

    fn broadcast(&self, root: Rank, from_root: Option<Bytes>) -> Result<Bytes, CollectiveError> {
        from_root.iter().for_each(|bytes| self.count(bytes));
        self.inner.broadcast(root, from_root)
    }

    fn all_gather(&self, mine: Bytes) -> Result<Vec<Bytes>, CollectiveError> {
        self.count(&mine);
        self.inner.all_gather(mine)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.inner.barrier()
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }
}

/// Trap 17: Megatron-Core gathers what every rank holds on every rank, in every save.
#[test]
fn trap_17_replicas_say_once_what_they_hold_and_then_only_that_nothing_changed() {
    const SHARDS: u64 = 500;
    let sent = on_boxed_ranks(8, |rank, group| {
        let sent = Arc::new(AtomicU64::default());
        let save = ParallelSave::new(Arc::new(Metered { inner: group, sent: Arc::clone(&sent) }));
        let counted = || {
            let mut tensors: Vec<_> = (0..SHARDS)
                .map(|at| {
                    let key = format!("decoder.layers.{at}.self_attention.linear_qkv.weight");
                    let local = LocalTensor::described(DType::BFloat16, [1024, 1024]);
                    let shard = ShardedTensor::from_rank_offsets(key, local);
                    shard.replica_id((0, 0, rank.into())).build().unwrap()
                })
                .collect();
            let done = block_on(save.redistribute(tensors.iter_mut().collect())).unwrap();
            (done.origin, sent.swap(0, Ordering::Relaxed))
        };
        [counted(), counted()]
    });
    for (rank, [first, second]) in sent.into_iter().enumerate() {
        assert_eq!((first.0, second.0), (DistributionOrigin::Exchange, DistributionOrigin::Memory));
        // A bit for each shard of each rank from the first rank, which decides.
        let most = if rank == 0 { SHARDS * 100 } else { SHARDS };
        assert!(first.1 < most, "rank {rank} sent {} bytes", first.1);
        assert!(second.1 < 400, "rank {rank} sent {} bytes again", second.1);
    }
}

/// Trap 19: PyTorch 2.15 writes a sixth property of every tensor, which earlier versions, and
/// Megatron-Core itself, cannot read.
#[test]
fn trap_19_both_numbers_of_properties_are_read_and_the_one_that_all_read_is_written() {
    let mut profiles = BTreeSet::new();
    for (name, _) in OPENED {
        let storage = stored(name);
        let Some(pickle) = get(&*storage, ".metadata") else { continue };
        profiles.extend(Profile::of(&pickle).map(|profile| format!("{profile:?}")));
        if *name == "tp2_basic" {
            let written = save_again(&open(&storage));
            let key = Key::new(".metadata").unwrap();
            let pickle = block_on(written.read_all(&key)).unwrap();
            assert_eq!(Profile::of(&pickle).unwrap(), Profile::Compat);
        }
    }
    assert!(profiles.len() > 1, "{profiles:?}");
}
