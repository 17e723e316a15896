//! What is saved is loaded again, however it is cut, and a second save replaces the first.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dcp_conformance::{CountingStorage, MemoryStorage};
use dcp_core::{
    CheckpointError, DType, HostMemory, Region, StorageErrorKind, StorageReader as _,
    StorageWriter as _, Tensor, Value,
};
use dcp_formats::dcp::{DcpReader, DcpWriter, FileLayout};
use dcp_formats::metadata::Profile;
use proptest::prelude::*;

use crate::harness::{
    Leaf, State, block_on, fixture, get, load, load_with, names, put, save, save_in_segments,
    write_all,
};

fn small(seed: u8) -> State {
    State::new(2)
        .rows("model.w", DType::BFloat16, &[5, 3], seed)
        .rows("model.empty", DType::Int64, &[0, 4], seed)
        .rows("scalar", DType::Float64, &[1], seed)
        .object("step", i64::from(seed))
        .object("name", "a \"name\"\n")
}

fn layouts() -> [FileLayout; 4] {
    let three = NonZeroUsize::new(3).unwrap();
    [
        FileLayout::OnePerRank,
        FileLayout::OnePerItem,
        FileLayout::SplitBySize(three),
        FileLayout::TorchCompatible(three),
    ]
}

#[test]
fn every_layout_and_profile_loads() {
    for layout in layouts() {
        for profile in [Profile::Compat, Profile::default()] {
            let storage = Arc::new(MemoryStorage::new());
            let writer = DcpWriter::builder(storage.clone()).files(layout).profile(profile).build();
            save(&writer, &small(3)).unwrap();
            let loaded = load(storage).unwrap();
            assert!(loaded.same(&small(3).loaded()), "{layout:?}");
            assert_eq!(loaded.warnings, [""; 0]);
        }
    }
}

#[test]
fn large_files_are_streamed_in_parts() {
    let storage = Arc::new(MemoryStorage::new());
    let counting = CountingStorage::new(storage.clone());
    let written = Arc::new(AtomicU64::new(0));
    let sum = Arc::clone(&written);
    let writer = DcpWriter::builder(Arc::new(counting.clone()))
        .progress(Arc::new(move |bytes| {
            sum.fetch_add(bytes, Ordering::Relaxed);
        }))
        .build();
    let state = State::new(1).rows("a", DType::UInt8, &[3, 30 << 20], 1).rows(
        "b",
        DType::UInt8,
        &[1000],
        2,
    );
    block_on(save_in_segments(&writer, &state, 7 << 20)).unwrap();
    assert_eq!((counting.counts().uploads, counting.counts().parts), (1, 6));
    let file = get(&*storage, "__0_0.distcp");
    assert_eq!(written.load(Ordering::Relaxed), file.len() as u64);
    assert!(load(storage).unwrap().same(&state.loaded()));
}

#[test]
fn an_idle_rank_leaves_an_empty_file() {
    let storage = Arc::new(MemoryStorage::new());
    let mut state = State::new(3).object("o", 1_i64);
    state = state.rows("w", DType::Float32, &[2, 2], 0);
    save(&DcpWriter::new(storage.clone()), &state).unwrap();
    assert!(get(&*storage, "__2_0.distcp").is_empty(), "f13");
    assert!(load(storage).unwrap().same(&state.loaded()));
}

#[test]
fn the_same_state_makes_the_same_bytes() {
    let files = || {
        let storage = Arc::new(MemoryStorage::new());
        save(&DcpWriter::new(storage.clone()), &small(9)).unwrap();
        names(&*storage).into_iter().map(|name| (get(&*storage, &name), name)).collect::<Vec<_>>()
    };
    assert_eq!(files(), files());
}

#[test]
fn t02_an_overwrite_keeps_the_old_checkpoint_until_the_commit() {
    let storage = fixture("nested");
    put(&*storage, "notes.txt", b"mine".to_vec());
    put(&*storage, "sub/__0_0.distcp", b"not mine".to_vec());
    let old = load(storage.clone()).unwrap();
    let writer = DcpWriter::new(storage.clone());
    let state = small(1);
    block_on(async {
        let session = writer.begin().await.unwrap();
        assert_eq!(session.generation, 1);
        let (locals, mut global, data) = state.plan(&writer);
        let plans = writer.place(&session, &locals, &mut global).unwrap();
        let reports = write_all(&writer, &locals, &plans, data, u64::MAX).await.unwrap();
        assert!(block(&storage).same(&old), "before the commit");
        writer.commit(session, &global.metadata, reports).await.unwrap();
    });
    assert!(load(storage.clone()).unwrap().same(&state.loaded()));
    let left = names(&*storage);
    let data: Vec<_> = left.iter().filter(|name| name.ends_with(".distcp")).collect();
    assert_eq!(data, ["__0_0.g1.distcp", "__1_0.g1.distcp", "sub/__0_0.distcp"]);
    assert!(left.contains(&"notes.txt".to_owned()));
    // And once more: the sidecar of the first goes, that of the second stays.
    save(&writer, &small(2)).unwrap();
    let left = names(&*storage);
    assert_eq!(left.iter().filter(|name| name.ends_with(".cbor")).count(), 1);
    assert!(left.contains(&"__0_0.g2.distcp".to_owned()), "{left:?}");
    assert!(load(storage).unwrap().same(&small(2).loaded()));
}

/// Loads on a thread of its own, because a runtime is running here.
fn block(storage: &Arc<MemoryStorage>) -> crate::harness::Loaded {
    let storage = Arc::clone(storage);
    std::thread::spawn(move || load(storage).unwrap()).join().unwrap()
}

#[test]
fn without_overwrite_a_checkpoint_is_safe() {
    let storage = fixture("no_collectives_2r");
    let before = names(&*storage);
    let writer = DcpWriter::builder(storage.clone()).overwrite(false).build();
    let CheckpointError::Storage(error) = save(&writer, &small(1)).unwrap_err() else {
        panic!("another error")
    };
    assert_eq!(error.kind(), StorageErrorKind::AlreadyExists);
    assert_eq!(names(&*storage), before);
    // What a dead save left is no checkpoint.
    let storage = Arc::new(MemoryStorage::new());
    put(&*storage, "__0_0.distcp", b"torn".to_vec());
    save(&DcpWriter::builder(storage.clone()).overwrite(false).build(), &small(1)).unwrap();
    assert!(load(storage.clone()).unwrap().same(&small(1).loaded()));
    assert!(!names(&*storage).contains(&"__0_0.distcp".to_owned()));
}

#[test]
fn two_savers_never_mix() {
    let storage = Arc::new(MemoryStorage::new().conditional_claims());
    let (first, second) = (DcpWriter::new(storage.clone()), DcpWriter::new(storage.clone()));
    block_on(async {
        let session = first.begin().await.unwrap();
        let other = second.begin().await.unwrap();
        let (state, rival) = (small(1), small(2));
        let (locals, mut global, data) = state.plan(&first);
        let plans = first.place(&session, &locals, &mut global).unwrap();
        let reports = write_all(&first, &locals, &plans, data, u64::MAX).await.unwrap();
        let (locals, mut rivals, data) = rival.plan(&second);
        let rival_plans = second.place(&other, &locals, &mut rivals).unwrap();
        let collided = write_all(&second, &locals, &rival_plans, data, u64::MAX).await;
        assert!(matches!(collided, Err(CheckpointError::Storage(error))
            if error.kind() == StorageErrorKind::AlreadyExists));
        for plan in &rival_plans {
            second.abandon(plan).await;
        }
        first.commit(session, &global.metadata, reports).await.unwrap();
    });
    assert!(load(storage).unwrap().same(&small(1).loaded()));
}

#[test]
fn a_commit_that_was_overtaken_fails() {
    let storage = Arc::new(MemoryStorage::new().conditional_claims());
    let late = DcpWriter::new(storage.clone());
    block_on(async {
        let session = late.begin().await.unwrap();
        let (locals, mut global, data) = small(1).plan(&late);
        let plans = late.place(&session, &locals, &mut global).unwrap();
        let reports = write_all(&late, &locals, &plans, data, u64::MAX).await.unwrap();
        save_in_segments(&DcpWriter::new(storage.clone()), &small(2), 16).await.unwrap();
        assert!(late.commit(session, &global.metadata, reports).await.is_err());
        for plan in &plans {
            late.abandon(plan).await;
        }
    });
    assert!(load(storage).unwrap().same(&small(2).loaded()));
}

#[test]
fn the_sidecar_tells_of_the_save() {
    let storage = Arc::new(MemoryStorage::new());
    save(&DcpWriter::new(storage.clone()), &small(1)).unwrap();
    let sidecar = block_on(DcpReader::new(storage.clone()).sidecar()).unwrap().unwrap();
    assert_eq!((sidecar.world_size, sidecar.generation), (2, 0));
    let lens: Vec<_> =
        sidecar.files.iter().map(|file| get(&*storage, &file.name).len() as u64).collect();
    assert_eq!(lens, sidecar.files.iter().map(|file| file.byte_len).collect::<Vec<_>>());
    let plain = Arc::new(MemoryStorage::new());
    save(&DcpWriter::builder(plain.clone()).sidecar(false).build(), &small(1)).unwrap();
    assert_eq!(names(&*plain), [".metadata", "__0_0.distcp", "__1_0.distcp"]);
    assert_eq!(block_on(DcpReader::new(plain).sidecar()).unwrap(), None);
}

#[test]
fn checksums_can_be_left_out() {
    let storage = Arc::new(MemoryStorage::new());
    save(&DcpWriter::builder(storage.clone()).checksums(false).build(), &small(1)).unwrap();
    assert!(load(storage).unwrap().same(&small(1).loaded()));
}

#[test]
fn wrong_data_and_unfit_tensors_are_refused() {
    let storage = Arc::new(MemoryStorage::new());
    let writer = DcpWriter::new(storage.clone());
    let mut short = small(1);
    let Leaf::Tensor { bytes, chunks, .. } = &mut short.leaves[0].1 else { panic!("no tensor") };
    bytes.truncate(30);
    chunks.truncate(1);
    block_on(async {
        let session = writer.begin().await.unwrap();
        let (locals, mut global, mut data) = small(1).plan(&writer);
        let plans = writer.place(&session, &locals, &mut global).unwrap();
        data[0][0].truncate(4);
        let error = write_all(&writer, &locals, &plans, data, u64::MAX).await.unwrap_err();
        assert!(error.to_string().contains("model.w"), "{error}");
    });
    let quantized = State::new(1).rows("q", DType::QInt8, &[4], 0);
    assert!(save(&writer, &quantized).unwrap_err().to_string().contains("scale"));
    // An item that nobody writes keeps the save from being committed.
    block_on(async {
        let session = writer.begin().await.unwrap();
        let (locals, mut global, data) = small(1).plan(&writer);
        global.selections[1].clear();
        let plans = writer.place(&session, &locals, &mut global).unwrap();
        let reports = write_all(&writer, &locals, &plans, data, u64::MAX).await.unwrap();
        assert!(writer.commit(session, &global.metadata, reports).await.is_err());
    });
}

fn leaf(world: usize) -> impl Strategy<Value = Leaf> {
    let dtypes: Vec<_> = DType::ALL.iter().copied().filter(|dtype| !dtype.is_quantized()).collect();
    let tensor = (prop::sample::select(dtypes), prop::collection::vec(0..9_u64, 0..4), any::<u8>());
    let cuts = prop::collection::vec(0..world, 1..6);
    prop_oneof![
        3 => (tensor, cuts).prop_map(|((dtype, shape, seed), ranks)| {
            let len = shape.iter().product::<u64>() as usize * dtype.size();
            let bytes = (0..len).map(|n| (n as u8).wrapping_mul(7).wrapping_add(seed)).collect();
            let mut chunks = Vec::new();
            let rows = shape.first().copied().unwrap_or(1);
            let parts = if shape.is_empty() || rows == 0 { 1 } else { ranks.len() as u64 };
            let step = rows.div_ceil(parts).max(1);
            for (part, rank) in (0..parts).zip(ranks) {
                let (mut offsets, mut sizes) = (vec![0; shape.len()], shape.clone());
                if let (Some(offset), Some(size)) = (offsets.first_mut(), sizes.first_mut()) {
                    *offset = (step * part).min(rows);
                    *size = step.min(rows - *offset);
                    if *size == 0 && rows > 0 {
                        continue;
                    }
                }
                chunks.push((rank, Region::new(offsets, sizes).unwrap()));
            }
            Leaf::Tensor { dtype, shape, bytes, chunks }
        }),
        1 => (0..world, any::<i64>()).prop_map(|(rank, n)| Leaf::Object { rank, value: n.into() }),
        1 => (0..world, ".{0,20}").prop_map(|(rank, text)| Leaf::Object {
            rank,
            value: Value::List(vec![text.as_str().into(), Value::None]),
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn what_is_saved_is_loaded(
        leaves in prop::collection::vec(leaf(3), 0..12),
        layout in 0..4_usize,
        segment in prop_oneof![Just(u64::MAX), 1..50_u64],
    ) {
        let leaves =
            leaves.into_iter().enumerate().map(|(n, leaf)| (format!("{n}"), leaf)).collect();
        let state = State { world: 3, leaves };
        let storage = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::builder(storage.clone()).files(layouts()[layout]).build();
        block_on(save_in_segments(&writer, &state, segment)).unwrap();
        prop_assert!(load(storage).unwrap().same(&state.loaded()));
    }
}

#[test]
fn progress_of_a_load_is_what_was_needed() {
    let storage = Arc::new(MemoryStorage::new());
    let state = State::new(2).rows("w", DType::UInt8, &[100, 10_000], 4);
    save(&DcpWriter::new(storage.clone()), &state).unwrap();
    let seen = Arc::new(Mutex::new(0));
    let sum = Arc::clone(&seen);
    let progress: dcp_formats::ByteProgress = Arc::new(move |bytes| *sum.lock().unwrap() += bytes);
    let reader = DcpReader::builder(storage).progress(progress).build();
    let loaded = load_with(&reader).unwrap();
    assert!(loaded.same(&state.loaded()));
    assert_eq!((*seen.lock().unwrap(), loaded.report.bytes_needed), (1_000_000, 1_000_000));
    let whole = Tensor::replicated(DType::UInt8, [1], HostMemory::zeroed(1)).unwrap();
    assert!(whole.to_vec().is_some());
    assert!(block_on(reader.metadata()).is_ok());
}

/// A chunk that is read together with its neighbors, and one that is read straight into place.
fn small_and_large(seed: u8) -> State {
    State::new(2)
        .rows("small", DType::Float32, &[4, 3], seed)
        .rows("large", DType::Float32, &[400, 300], seed)
        .object("object", i64::from(seed))
}

/// A file of another save of the same model is sound in itself: only the sidecar shows it.
#[test]
fn a_file_of_another_save_is_named_with_key_and_offset() {
    let saved = |seed| {
        let storage = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::builder(storage.clone()).files(FileLayout::OnePerItem).build();
        save(&writer, &small_and_large(seed)).unwrap();
        storage
    };
    let (one, other) = (saved(1), saved(2));
    for file in names(&*one).iter().filter(|name| name.ends_with(".distcp")) {
        let mixed = saved(1);
        put(&*mixed, file, get(&*other, file).to_vec());
        let reader = DcpReader::builder(mixed.clone()).compare_saved(true).build();
        let error = load_with(&reader).map(drop).unwrap_err().to_string();
        assert!(
            error.contains(file.as_str()) && error.contains("not the bytes of this save"),
            "{error}"
        );
        assert!(["small", "large", "object"].iter().any(|fqn| error.contains(fqn)), "{error}");
        let sidecar = names(&*mixed).into_iter().find(|name| name.ends_with(".cbor")).unwrap();
        put(&*mixed, &sidecar, b"damaged".to_vec());
        // A sidecar that cannot be read is none.
        let reader = DcpReader::builder(mixed).compare_saved(true).build();
        load_with(&reader).unwrap();
    }
}

#[test]
fn the_sidecar_notes_ranks_checksums_and_the_origin_of_a_save() {
    let storage = Arc::new(MemoryStorage::new());
    let writer = DcpWriter::builder(storage.clone())
        .steps(20, Some(10))
        .mesh([("dp", 1), ("tp", 2)])
        .build();
    save(&writer, &small_and_large(1)).unwrap();
    let sidecar = block_on(DcpReader::new(storage.clone()).sidecar()).unwrap().unwrap();
    assert_eq!((sidecar.step, sidecar.parent_step), (Some(20), Some(10)));
    assert_eq!(sidecar.mesh, [("dp".to_owned(), 1), ("tp".to_owned(), 2)]);
    let ranks: Vec<_> = sidecar.files.iter().map(|file| (file.rank, file.chunks.len())).collect();
    assert_eq!(ranks, [(Some(0), 3), (Some(1), 2)]);
    let plain = Arc::new(MemoryStorage::new());
    save(&DcpWriter::builder(plain.clone()).sidecar(false).build(), &small_and_large(1)).unwrap();
    assert!(block_on(DcpReader::new(plain.clone()).sidecar()).unwrap().is_none());
    assert!(load(plain).unwrap().same(&small_and_large(1).loaded()));
}
