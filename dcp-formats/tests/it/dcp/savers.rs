//! Several savers in one place, at the worst moments.

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use dcp_conformance::{MemoryStorage, SlowStorage, StallStorage};
use dcp_core::error::StorageOp;
use dcp_core::storage::{Capabilities, Claim, ObjectMeta, PutMode};
use dcp_core::{
    CheckpointError, DType, Key, Payload, Storage, StorageError, StorageErrorKind,
    StorageWriter as _,
};
use dcp_formats::dcp::DcpWriter;
use tokio::time::Instant;

use crate::harness::{State, block_on, get, key, load, names, save, save_in_segments, write_all};

fn small(seed: u8) -> State {
    State::new(2).rows("w", DType::BFloat16, &[5, 3], seed).object("step", i64::from(seed))
}

/// A storage without claims that another saver changes too.
#[derive(Debug)]
struct Shared {
    inner: Arc<MemoryStorage>,
    /// Is saved, completely, when a commit has checked its files and writes its sidecar.
    rival: Mutex<Option<State>>,
    /// Replaces the `.metadata` of a commit right after it came.
    successor: Option<Bytes>,
}

#[async_trait]
impl Storage for Shared {
    dcp_core::forward_storage!(
        inner: stat, read, read_whole, start_upload, list, list_folder, delete, leftovers, remove_empty_folders
    );

    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.inner.capabilities();
        capabilities.claims = false;
        capabilities
    }

    async fn put(
        &self,
        key: &Key,
        payload: Payload,
        mode: PutMode,
    ) -> Result<ObjectMeta, StorageError> {
        let sidecar = key.as_str().ends_with(".cbor");
        let rival = self.rival.lock().unwrap().take_if(|_| sidecar);
        if let Some(rival) = rival {
            save_in_segments(&DcpWriter::new(self.inner.clone()), &rival, 1 << 20).await.unwrap();
        }
        let meta = self.inner.put(key, payload, mode).await?;
        match &self.successor {
            Some(bytes) if key.as_str() == ".metadata" => {
                self.inner.put(key, bytes.clone().into(), PutMode::Overwrite).await
            }
            _ => Ok(meta),
        }
    }

    async fn claim(&self, key: &Key) -> Result<Arc<dyn Claim>, StorageError> {
        Err(StorageError::new(StorageErrorKind::Unsupported, StorageOp::Claim, Some(key.clone())))
    }
}

/// How two saves went.
type Outcomes = [Result<(), CheckpointError>; 2];

/// Two savers in one place: each is stopped before one of its operations while the other one goes on.
/// Returns `None` when they have fewer operations than that.
fn meet(memory: &Arc<MemoryStorage>, stops: [u64; 2]) -> Option<Outcomes> {
    let storages = stops.map(|stop| StallStorage::new(memory.clone(), stop));
    let mut context = Context::from_waker(Waker::noop());
    let mut saves = [1, 2].map(|seed| {
        let writer = DcpWriter::new(Arc::new(storages[usize::from(seed) - 1].clone()));
        Box::pin(async move { save_in_segments(&writer, &small(seed), 1 << 20).await })
    });
    let mut outcomes = [None, None];
    for round in 0..2 {
        for (save, outcome) in saves.iter_mut().zip(&mut outcomes) {
            if outcome.is_none()
                && let Poll::Ready(result) = save.as_mut().poll(&mut context)
            {
                *outcome = Some(result);
            }
            if round == 0 {
                continue;
            }
            assert!(outcome.is_some(), "a saver that was let go on is stuck");
        }
        let [first, second] = &outcomes;
        if round == 0 && first.is_some() && second.is_some() {
            return None;
        }
        storages.iter().for_each(StallStorage::resume);
    }
    let [Some(first), Some(second)] = outcomes else { panic!("a saver is stuck") };
    Some([first, second])
}

#[test]
fn of_two_savers_stopped_at_every_step_one_wins_and_its_checkpoint_is_whole() {
    let locking = MemoryStorage::new;
    let conditional = || MemoryStorage::new().conditional_claims();
    for (mode, storage) in
        [("locking", &locking as &dyn Fn() -> MemoryStorage), ("conditional", &conditional)]
    {
        let (mut met, mut refused) = (0, 0);
        for first in 1..40 {
            for second in 1..40 {
                let memory = Arc::new(storage());
                save(&DcpWriter::new(memory.clone()), &small(9)).unwrap();
                let Some(outcomes) = meet(&memory, [first, second]) else { continue };
                let at = format!("{mode}, stopped at {first} and {second}: {outcomes:?}");
                met += 1;
                for outcome in &outcomes {
                    let Err(error) = outcome else { continue };
                    refused += 1;
                    let CheckpointError::Storage(error) = error else { panic!("{at}") };
                    assert!(error.key().is_some(), "{at}");
                    let kinds = [StorageErrorKind::Conflict, StorageErrorKind::AlreadyExists];
                    assert!(kinds.contains(&error.kind()), "{at}");
                }
                assert!(outcomes.iter().any(Result::is_ok), "{at}");
                let loaded = load(memory.clone()).unwrap_or_else(|error| panic!("{error}; {at}"));
                let winner = (1..=2).find(|seed| loaded.same(&small(*seed).loaded()));
                let winner = winner.unwrap_or_else(|| panic!("neither is there; {at}"));
                assert!(outcomes[usize::from(winner) - 1].is_ok(), "{at}");
                // The next saver does not wait, and cleans up.
                save(&DcpWriter::new(memory.clone()), &small(3)).unwrap();
                assert!(load(memory.clone()).unwrap().same(&small(3).loaded()), "{at}");
                assert_eq!(names(&*memory).len(), 4, "{:?}; {at}", names(&*memory));
            }
        }
        assert!(met > 100 && refused > 50, "{mode}: {met} met, {refused} were refused");
    }
}

#[test]
fn a_saver_that_gives_up_at_any_step_holds_nobody_up() {
    for stop in 1..40 {
        let memory = Arc::new(MemoryStorage::new());
        save(&DcpWriter::new(memory.clone()), &small(9)).unwrap();
        let stalled = StallStorage::new(memory.clone(), stop);
        let writer = DcpWriter::new(Arc::new(stalled));
        let state = small(1);
        let mut dropped = Box::pin(save_in_segments(&writer, &state, 1 << 20));
        let mut context = Context::from_waker(Waker::noop());
        let over = dropped.as_mut().poll(&mut context).is_ready();
        drop(dropped);
        save(&DcpWriter::new(memory.clone()), &small(2)).unwrap();
        assert!(load(memory.clone()).unwrap().same(&small(2).loaded()), "stopped at {stop}");
        if over {
            return;
        }
    }
    panic!("a save has fewer operations");
}

#[test]
fn a_commit_that_is_overtaken_after_it_checked_its_files_fails() {
    let inner = Arc::new(MemoryStorage::new());
    let rival = Mutex::new(Some(small(2)));
    let storage = Arc::new(Shared { inner: inner.clone(), rival, successor: None });
    let error = save(&DcpWriter::new(storage), &small(1)).unwrap_err();
    assert!(error.to_string().contains("another save"), "{error}");
    assert!(load(inner.clone()).unwrap().same(&small(2).loaded()));
    let sidecars = names(&*inner).iter().filter(|name| name.ends_with(".cbor")).count();
    assert_eq!(sidecars, 1, "{:?}", names(&*inner));
}

#[test]
fn metadata_written_anew_with_the_same_bytes_is_no_other_save() {
    let storage = Arc::new(MemoryStorage::new());
    let late = DcpWriter::new(storage.clone());
    save(&late, &small(1)).unwrap();
    let whole = get(&*storage, ".metadata").to_vec();
    block_on(async {
        let session = late.begin().await.unwrap();
        let (locals, mut global, data) = small(2).plan(&late);
        let plans = late.place(&session, &locals, &mut global).unwrap();
        let reports = write_all(&late, &locals, &plans, data, u64::MAX).await.unwrap();
        // Rewritten with the same bytes: there was no other saver.
        let same = Payload::from(whole.clone());
        storage.put(&key(".metadata"), same, PutMode::Overwrite).await.unwrap();
        late.commit(session, &global.metadata, reports).await.unwrap();
    });
    assert!(load(storage).unwrap().same(&small(2).loaded()));
}

#[test]
fn files_that_the_current_metadata_refers_to_are_never_removed() {
    let inner = Arc::new(MemoryStorage::new());
    save(&DcpWriter::new(inner.clone()), &small(1)).unwrap();
    let old = get(&*inner, ".metadata");
    let rival = Mutex::default();
    let storage = Shared { inner: inner.clone(), rival, successor: Some(old) };
    save(&DcpWriter::new(Arc::new(storage)), &small(2)).unwrap();
    assert!(load(inner.clone()).unwrap().same(&small(1).loaded()));

    // What cannot be read refers to anything.
    let before = names(&*inner);
    let successor = Some(Bytes::from_static(b"another format"));
    let storage = Shared { inner: inner.clone(), rival: Mutex::default(), successor };
    save(&DcpWriter::new(Arc::new(storage)), &small(3)).unwrap();
    assert!(before.iter().all(|name| names(&*inner).contains(name)));
}

/// The answers that a save into an empty folder of an object store waits for, one after the other.
#[test]
fn a_save_waits_for_as_few_answers_as_its_order_needs() {
    let second = Duration::from_secs(1);
    let answers = |storage: MemoryStorage, part_bytes: u64| {
        let mut capabilities = storage.capabilities();
        capabilities.write_limits.part_bytes = part_bytes;
        let storage = SlowStorage::new(Arc::new(storage.with_capabilities(capabilities)), second);
        let writer = DcpWriter::new(Arc::new(storage));
        // The clock stands still but for waits, whatever the machine does.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let begun = Instant::now();
            save_in_segments(&writer, &one_rank(), u64::MAX).await.unwrap();
            begun.elapsed().as_secs()
        })
    };
    let (small, large) = (1 << 20, 512);
    let object_store = || MemoryStorage::new().conditional_claims();
    // The look with the claim; the data; the sidecar with the comparison; `.metadata`.
    assert_eq!(answers(object_store(), small), 4);
    // An upload begins, has parts and is completed.
    assert_eq!(answers(object_store(), large), 6);
    let locks = || {
        let storage = MemoryStorage::new();
        let mut capabilities = storage.capabilities();
        capabilities.conditional_put = false;
        storage.with_capabilities(capabilities)
    };
    // The claim comes before the look, and the comparison directly before `.metadata`.
    assert_eq!(answers(locks(), small), 6);
}

fn one_rank() -> State {
    State::new(1).rows("w", DType::Float32, &[20, 30], 3).object("step", 7)
}
