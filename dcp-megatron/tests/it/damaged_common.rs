//! Checkpoints whose common state is damaged: no job makes one of it that `verify`
//! refuses.

use std::sync::Arc;

use dcp_conformance::MemoryStorage;
use dcp_core::Storage;
use dcp_formats::dcp::DcpWriter;
use dcp_formats::torch_zip::{ArchiveEncoder, RecordSet};
use dcp_jobs::reshard::reshard;
use dcp_jobs::{JobOptions, Source};
use dcp_megatron::jobs::to_torch_dist;
use dcp_megatron::partition::ParallelLayout;
use dcp_megatron::{MegatronCheckpoint, MegatronOpenOptions, MegatronWriter, verify};

use crate::support::{block_on, fixture, get, in_memory, put};

#[test]
fn what_is_made_of_a_damaged_common_state_passes_every_check() {
    let mut made = 0;
    for (name, step) in [("tp2_basic/ckpt", 13), ("factories/ckpt", 11)] {
        let whole = in_memory(&fixture(name));
        let common = get(&*whole, "common.pt").unwrap();
        let options = JobOptions::default();
        for at in (0..common.len()).step_by(step) {
            let mut bytes = common.clone();
            bytes[at] ^= 1 << (at % 8);
            put(&*whole, "common.pt", bytes);
            let storage = Arc::clone(&whole) as Arc<dyn Storage>;
            let opened =
                block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default()));
            let Ok(checkpoint) = opened else { continue };
            let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let writer = DcpWriter::new(Arc::clone(&target));
            if block_on(reshard(checkpoint.source(), &writer, 1, &options)).is_ok() {
                let source = Source::dcp(target, false);
                let report = block_on(dcp_jobs::verify::verify(&source, true, &options)).unwrap();
                assert!(report.ok, "{name}, byte {at}, to dcp: {:?}", report.problems);
                made += 1;
            }
            let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            let writer = MegatronWriter::builder(Arc::clone(&target));
            let layout = ParallelLayout::new(1, 1);
            if block_on(to_torch_dist(checkpoint.source(), writer, layout, &options)).is_ok() {
                let report = block_on(verify(&target, true, &options)).unwrap();
                assert!(report.ok, "{name}, byte {at}, to torch_dist: {:?}", report.problems);
                made += 1;
            }
        }
    }
    assert!(made > 10, "only {made} of the mutants could be read");
}

/// A common state with a list in two places is kept as it was stored. Damage to a record of it that
/// says nothing of the values shows in none of them, and so has to be looked for.
#[test]
fn damage_beside_the_values_of_a_common_state_is_not_carried_over() {
    let whole = in_memory(&fixture("tp2_basic/ckpt"));
    // {"a": list, "b": list}
    let pickle = b"\x80\x02}q\x00(X\x01\x00\x00\x00a]q\x01X\x01\x00\x00\x00bh\x01u.";
    let pickle = bytes::Bytes::from_static(pickle);
    let common = ArchiveEncoder::encode(RecordSet::default(), pickle, &[]).unwrap();
    let name = b"/version";
    let record = common.windows(name.len()).position(|bytes| bytes == name).unwrap();
    let version = common[record..].windows(2).position(|bytes| bytes == b"3\n").unwrap();
    let mut damaged = common.to_vec();
    damaged[record + version] = b'4';
    for (common, is_whole) in [(common.to_vec(), true), (damaged, false)] {
        put(&*whole, "common.pt", common);
        let storage = Arc::clone(&whole) as Arc<dyn Storage>;
        let opened = block_on(MegatronCheckpoint::open(&storage, &MegatronOpenOptions::default()));
        let options = JobOptions::default();
        let target: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::new(Arc::clone(&target));
        let written = block_on(reshard(opened.unwrap().source(), &writer, 1, &options));
        if written.is_ok() {
            let report =
                block_on(dcp_jobs::verify::verify(&Source::dcp(target, false), true, &options));
            let report = report.unwrap();
            assert!(report.ok, "{:?}", report.problems);
        }
        assert_eq!(written.is_ok(), is_whole);
    }
}
