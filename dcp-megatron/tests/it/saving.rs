//! Saves that would lose data are refused, and what fails once does not spoil what follows.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use dcp_collectives::LocalCollective;
use dcp_conformance::CountingStorage;
use dcp_core::value::{Dict, Global, MadeBy, Object};
use dcp_core::{Collective, Storage, Tensor, Value};
use dcp_formats::dcp::FileLayout;
use dcp_jobs::JobOptions;
use dcp_megatron::disk::{Manifest, verify_integrity};
use dcp_megatron::parallel::ParallelSave;
use dcp_megatron::parallel::SaveDistribution;
use dcp_megatron::sharded::{
    ObjectKey, ShardedObject, ShardedStateDict, ShardedTensor, ShardedValue,
};
use dcp_megatron::{
    MegatronBackgroundSaver, MegatronError, MegatronLoadOptions, MegatronSaveOptions, async_save,
    load, save,
};

use crate::small_model::{memory, on_ranks, view};
use crate::support::{block_on, get, names};

/// A second group of the same ranks, each taken by its rank.
fn group(ranks: u32) -> Vec<Arc<dyn Collective>> {
    LocalCollective::group(ranks).into_iter().map(|rank| Arc::new(rank) as _).collect()
}

fn at(rank: u64) -> usize {
    usize::try_from(rank).unwrap()
}

/// A whole tensor of `byte`s under "w".
fn filled(byte: u8) -> ShardedTensor {
    ShardedTensor::from_rank_offsets("w", view(&[4], vec![byte; 16])).build().unwrap()
}

/// What ranks of one parallelization group get for their states.
fn shared_out(
    storage: &Arc<dyn Storage>,
    validate: bool,
    state: impl Fn(u64) -> ShardedStateDict + Sync,
) -> Vec<Result<(), MegatronError>> {
    let replicas = group(2);
    on_ranks(2, |rank, world| {
        let share = ParallelSave::new(Arc::clone(&replicas[at(rank)]));
        let options = MegatronSaveOptions::new()
            .group(world)
            .validate_access_integrity(validate)
            .distribution(Arc::new(share));
        block_on(save(&state(rank), storage, &options)).map(|_| ())
    })
}

/// An expert whose offset was forgotten: every rank has another one under the same name. To share
/// out the work must not choose one of them.
#[test]
fn main_replicas_that_are_there_twice_are_not_hidden_by_sharing_out() {
    let forgotten = |rank: u64| -> ShardedStateDict { [("w", filled(rank as u8))].into() };
    // Two layers of one rank, of which the second forgot its number.
    let layers = |rank: u64| -> ShardedStateDict {
        let layer = |n| filled(n).with_replica_id(rank);
        [("l0", layer(1)), ("l1", layer(2))].into()
    };
    let storage = memory();
    let both = [
        (shared_out(&storage, true, forgotten), "\"w\" has several main replicas"),
        (shared_out(&storage, true, layers), "\"w\" has several main replicas"),
    ];
    for (results, said) in both {
        for result in results {
            let error = result.unwrap_err();
            assert!(matches!(error, MegatronError::Integrity(_)), "{error}");
            assert!(error.to_string().contains(said), "{error}");
        }
    }
    // What nobody checks before is still not shared out.
    for results in [shared_out(&storage, false, forgotten), shared_out(&storage, false, layers)] {
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("\"w\"") && error.contains("main replica"), "{error}");
        }
    }
    assert!(names(&*storage).is_empty(), "{:?}", names(&*storage));
}

/// Returns what the test gave it.
#[derive(Debug)]
struct Fixed(Vec<bool>);

#[async_trait]
impl SaveDistribution for Fixed {
    async fn owned(&self, _: &[&ShardedTensor]) -> Result<Vec<bool>, MegatronError> {
        Ok(self.0.clone())
    }
}

#[test]
fn a_distribution_that_does_not_tell_of_every_shard_is_refused_on_all_ranks() {
    for validate in [true, false] {
        for owned in [vec![], vec![true, false], vec![true; 4]] {
            let storage = memory();
            let results = on_ranks(2, |rank, world| {
                let named = |key: &str| {
                    let shard = filled(1).with_key(key).with_replica_id(rank);
                    (key.to_owned(), ShardedValue::from(shard))
                };
                let state: ShardedStateDict = ["a", "b", "c"].map(named).into();
                let owned = if rank == 1 { owned.clone() } else { vec![true; 3] };
                let options = MegatronSaveOptions::new()
                    .group(world)
                    .validate_access_integrity(validate)
                    .distribution(Arc::new(Fixed(owned)));
                block_on(save(&state, &storage, &options))
            });
            for result in results {
                let error = result.unwrap_err().to_string();
                assert!(error.contains("rank 1") && error.contains("of 3 shards"), "{error}");
            }
        }
    }
}

/// A tensor of which a part is missing, so that it cannot be encoded.
fn unencodable() -> Value {
    use dcp_core::{DType, HostMemory, Region, Shard};
    let region = Region::new([0], [1]).unwrap();
    let half = Shard::new(DType::UInt8, region, HostMemory::zeroed(1)).unwrap();
    Value::Tensor(Tensor::sharded(DType::UInt8, [2], vec![half]).unwrap())
}

#[test]
fn saves_go_on_after_one_rank_could_not_encode_an_object() {
    let background = group(2);
    let places = [memory(), memory(), memory()];
    on_ranks(2, |rank, world| {
        let options = MegatronSaveOptions::new().group(world);
        let background = MegatronBackgroundSaver::new(Some(Arc::clone(&background[at(rank)])));
        let state = |bad: bool| -> ShardedStateDict {
            let data = if bad && rank == 1 { unencodable() } else { Value::Int(1) };
            [("o", ShardedObject::new("o", data, [2], [rank]).unwrap())].into()
        };
        assert!(block_on(save(&state(true), &places[0], &options)).is_err());
        block_on(save(&state(false), &places[1], &options)).unwrap();
        block_on(async {
            let begin =
                async |bad| async_save(&state(bad), &places[2], &options, &background).await;
            match begin(true).await {
                Ok(pending) => drop(pending.wait().await.unwrap_err()),
                Err(error) => panic!("{error}"),
            }
            begin(false).await.unwrap().wait().await.unwrap();
        });
    });
}

#[test]
fn objects_are_copied_with_the_tensors_in_them_for_a_background_save() {
    let storage = memory();
    let held = view(&[1], vec![7; 4]);
    let tensor = Value::Tensor(Tensor::from_view(held.clone()).unwrap());
    let mut object = Object::new(Global::new("collections", "Thing"), vec![]);
    object.made_by = MadeBy::New;
    object.state = Some(Dict::from([("t", tensor)]).into());
    let data = Value::Object(Box::new(object));
    let state: ShardedStateDict = [("o", ShardedObject::single("o", data).unwrap())].into();
    let request = ShardedObject::request(ObjectKey::new("o", [1], [0]).unwrap());
    let loaded = block_on(async {
        let background = MegatronBackgroundSaver::new(None);
        let options = MegatronSaveOptions::new();
        let pending = async_save(&state, &storage, &options, &background).await.unwrap();
        held.fill_from(&[9; 4]).unwrap();
        pending.wait().await.unwrap();
        load(&[("o", request)].into(), &storage, &MegatronLoadOptions::new()).await.unwrap()
    });
    let Some(Value::Object(object)) = loaded.state.get("o").map(Value::view) else {
        panic!("{:?}", loaded.state)
    };
    let stored = object.state.as_ref().unwrap().as_dict().unwrap().get("t").unwrap();
    assert_eq!(stored.as_tensor().unwrap().to_vec().unwrap(), [7; 4]);
}

#[test]
fn how_files_are_divided_is_an_option_of_a_save() {
    let named = |key: &str| (key.to_owned(), ShardedValue::from(filled(1).with_key(key)));
    let state: ShardedStateDict = ["a", "b", "c"].map(named).into();
    for (layout, files) in [
        (FileLayout::OnePerItem, 3),
        (FileLayout::MegatronCompatible(NonZeroUsize::MIN.saturating_add(1)), 2),
        (FileLayout::OnePerRank, 1),
    ] {
        let storage = memory();
        block_on(save(&state, &storage, &MegatronSaveOptions::new().files(layout))).unwrap();
        let names = names(&*storage);
        let data = names.iter().filter(|name| name.ends_with(".distcp")).count();
        assert_eq!(data, files, "{layout:?}: {names:?}");
    }
}

/// The coordinator alone would read the whole checkpoint while the others wait for its commit.
#[test]
fn every_rank_hashes_the_files_that_it_wrote() {
    let shared = memory();
    let read = on_ranks(3, |rank, world| {
        let counted = CountingStorage::new(Arc::clone(&shared));
        let storage: Arc<dyn Storage> = Arc::new(counted.clone());
        let bytes = vec![u8::try_from(rank).unwrap(); 400_000];
        let shard = ShardedTensor::from_rank_offsets("w", view(&[100_000], bytes));
        let shard = shard.offset(0, rank, 3).build().unwrap();
        let options = MegatronSaveOptions::new().group(world).integrity(true);
        block_on(save(&[("w", shard)].into(), &storage, &options)).unwrap();
        counted.counts().bytes_read
    });
    for (rank, bytes) in read.into_iter().enumerate() {
        assert!((400_000..450_000).contains(&bytes), "rank {rank} has read {bytes} bytes");
    }
    let problems = block_on(verify_integrity(&shared, &JobOptions::default())).unwrap();
    assert_eq!(problems, Some(vec![]));
    let manifest = Manifest::parse(&get(&*shared, "integrity.json").unwrap()).unwrap();
    let mut files: Vec<_> = manifest.files.into_keys().collect();
    files.push("integrity.json".to_owned());
    files.sort();
    assert_eq!(files, names(&*shared));
}

/// A saver of another group would have every rank commit a checkpoint of its own into one folder.
#[test]
fn a_background_saver_of_another_group_is_refused_on_all_ranks() {
    let turned: Vec<_> = group(2).into_iter().rev().collect();
    let wide = Mutex::new(LocalCollective::group(3).into_iter().rev().collect::<Vec<_>>());
    let fitting = group(2);
    let saver_of = |kind: &str, rank: u64| match (kind, rank) {
        ("none", _) | ("one none", 1) => None,
        ("turned", _) => Some(Arc::clone(&turned[at(rank)])),
        ("wide", 1) => wide.lock().unwrap().pop().map(|third| Arc::new(third) as _),
        _ => Some(Arc::clone(&fitting[at(rank)])),
    };
    for kind in ["none", "one none", "turned", "wide"] {
        let storage = memory();
        let results = on_ranks(2, |rank, world| {
            let state: ShardedStateDict = [("w", filled(3).with_replica_id(rank))].into();
            let background = MegatronBackgroundSaver::new(saver_of(kind, rank));
            let options = MegatronSaveOptions::new().group(world);
            block_on(async {
                async_save(&state, &storage, &options, &background).await.map(|_| ())
            })
        });
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("background"), "{kind}: {error}");
        }
        assert!(names(&*storage).is_empty(), "{kind}: {:?}", names(&*storage));
    }
}
