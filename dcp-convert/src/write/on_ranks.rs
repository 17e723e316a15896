//! What the ranks of a group tell each other about a checkpoint that they write together.

use std::ops::Range;

use bytes::Bytes;
use dcp_core::checkpoint::WriteReport;
use dcp_core::digest::fnv1a_128;
use dcp_core::plan::{SavePlan, WritePlan};
use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, CollectiveError, Key, PlanError, StorageError};

use crate::group::JobGroup;

const PLANS: [u8; 4] = *b"dwp1";
const REPORTS: [u8; 4] = *b"dwr1";
const FILES: [u8; 4] = *b"dwf1";

/// The write plans of rank 0, on all ranks; refused by a rank whose `locals` are others.
pub(crate) async fn share_plans(
    group: &JobGroup,
    locals: &[SavePlan],
    plans: Option<Vec<WritePlan>>,
) -> Result<Vec<WritePlan>, CheckpointError> {
    let mut fingerprints = MessageWriter::new(PLANS);
    locals.iter().for_each(|local| fingerprints.bytes(&local.fingerprint().to_le_bytes()));
    let planned = fnv1a_128(&fingerprints.finish()).to_le_bytes();
    let mut message = MessageWriter::new(PLANS);
    message.bytes(&planned);
    let own = plans.unwrap_or_default();
    message.number(own.len() as u64);
    own.iter().for_each(|plan| message.bytes(&plan.to_wire()));
    let message = group.broadcast(message.finish()).await?;
    if group.is_coordinator() {
        return Ok(own);
    }
    let mut message = MessageReader::new(&message, PLANS)?;
    if message.bytes()? != planned {
        return Err(differs());
    }
    let mut plans = Vec::new();
    for _ in 0..message.count()? {
        plans.push(WritePlan::from_wire(message.bytes()?)?);
    }
    message.finish()?;
    if plans.len() != locals.len() {
        let (expected, found) = (locals.len(), plans.len());
        return Err(PlanError::PlanCount { made_by: "rank 0".into(), expected, found }.into());
    }
    Ok(plans)
}

/// Refuses names of files that are not those of rank 0. Then all ranks have looked at the target, and
/// none has written yet.
pub(crate) async fn same_names<'a>(
    group: &JobGroup,
    names: impl Iterator<Item = &'a Key>,
) -> Result<(), CheckpointError> {
    let mut message = MessageWriter::new(FILES);
    names.for_each(|name| message.text(name.as_str()));
    let mine = fnv1a_128(&message.finish()).to_le_bytes();
    let all = group.all_gather(Bytes::copy_from_slice(&mine)).await?;
    if all.iter().any(|one| **one != mine) { Err(differs()) } else { Ok(()) }
}

fn differs() -> CheckpointError {
    CollectiveError::Mismatch {
        rank: 0,
        op: "the plan of a job",
        message:
            "it plans other files; give all ranks the same options, and paths of a file system \
                  that all of them share"
                .to_owned(),
    }
    .into()
}

/// Whether `error` is that of a rank that reported a failure, so that no exchange took place. After
/// another error of the group, rank 0 may have received what this rank sent.
pub(crate) fn was_not_exchanged(error: &CheckpointError) -> bool {
    matches!(error, CheckpointError::Collective(CollectiveError::Aborted { .. }))
}

/// What all ranks wrote, in their order, on rank 0; nothing on others.
pub(crate) async fn gather_reports(
    group: &JobGroup,
    mine: &[WriteReport],
) -> Result<Option<Vec<WriteReport>>, CheckpointError> {
    let Some(all) = group.gather(encode(mine)).await? else { return Ok(None) };
    let mut reports = Vec::new();
    for message in all {
        reports.extend(decode(&message)?);
    }
    Ok(Some(reports))
}

/// The files that all ranks wrote, on rank 0; nothing on others.
pub(crate) async fn gather_files(
    group: &JobGroup,
    mine: &[(Key, u64)],
) -> Result<Option<Vec<(Key, u64)>>, CheckpointError> {
    let reports = gather_reports(group, &[WriteReport::new(mine.to_vec())]).await?;
    Ok(reports.map(|reports| reports.into_iter().flat_map(|report| report.files).collect()))
}

fn encode(reports: &[WriteReport]) -> Bytes {
    let mut out = MessageWriter::new(REPORTS);
    out.number(reports.len() as u64);
    for report in reports {
        out.number(report.files.len() as u64);
        for (key, len) in &report.files {
            out.text(key.as_str());
            out.number(*len);
            out.bytes(report.sha256.get(key).map_or(&[], |hash| hash.as_slice()));
            let checksums = report.checksums.get(key).map_or(&[][..], Vec::as_slice);
            out.number(checksums.len() as u64);
            let mut last = 0;
            for (offset, crc32) in checksums {
                out.number(offset.wrapping_sub(last));
                out.number((*crc32).into());
                last = *offset;
            }
            let stored = report.stored.get(key).map_or(&[][..], Vec::as_slice);
            out.number(stored.len() as u64);
            for (planned, range) in stored {
                out.number(*planned);
                out.number(range.start);
                out.number(range.end);
            }
        }
    }
    out.finish()
}

fn decode(message: &[u8]) -> Result<Vec<WriteReport>, CheckpointError> {
    let mut input = MessageReader::new(message, REPORTS)?;
    let bad = |problem: &str| PlanError::Message {
        message: "the report of a rank".into(),
        problem: problem.to_owned(),
    };
    let mut reports = Vec::new();
    for _ in 0..input.count()? {
        let mut report = WriteReport::default();
        for _ in 0..input.count()? {
            let key = Key::new(input.text()?).map_err(StorageError::from)?;
            report.files.push((key.clone(), input.number()?));
            match input.bytes()? {
                [] => {}
                hash => {
                    let hash = hash.try_into().map_err(|_| bad("a hash of another length"))?;
                    report.sha256.insert(key.clone(), hash);
                }
            }
            let mut checksums = Vec::new();
            let mut last = 0_u64;
            for _ in 0..input.count()? {
                last = last.wrapping_add(input.number()?);
                let crc32 = u32::try_from(input.number()?).map_err(|_| bad("a large CRC-32"))?;
                checksums.push((last, crc32));
            }
            if !checksums.is_empty() {
                report.checksums.insert(key.clone(), checksums);
            }
            let mut stored = Vec::new();
            for _ in 0..input.count()? {
                let planned = input.number()?;
                stored.push((planned, input.number()?..input.number()?));
            }
            if !stored.is_empty() {
                report.stored.insert(key, stored);
            }
        }
        reports.push(report);
    }
    input.finish()?;
    Ok(reports)
}

/// The bytes that the items of each plan take, of which the ranks get about the same.
pub(crate) fn share_of(group: Option<&JobGroup>, byte_lens: &[u64]) -> Range<usize> {
    match group {
        Some(group) => crate::group::contiguous_share(byte_lens, group.rank(), group.world_size()),
        None => 0..byte_lens.len(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn reports_arrive_as_they_were_sent() {
        let key = |name: &str| Key::new(name).unwrap();
        let first = WriteReport::new(vec![(key("__0_0.distcp"), 1 << 40), (key("empty"), 0)])
            .with_sha256(BTreeMap::from([(key("empty"), [7; 32])]))
            .with_checksums(BTreeMap::from([(
                key("__0_0.distcp"),
                vec![(0, 1), (700, u32::MAX), (64, 0)],
            )]))
            .with_stored(BTreeMap::from([(
                key("__0_0.distcp"),
                vec![(9, 0..4), (0, 4..u64::MAX)],
            )]));
        let reports = vec![first, WriteReport::default()];
        let message = encode(&reports);
        assert_eq!(decode(&message).unwrap(), reports);
        for len in 0..message.len() {
            assert!(decode(&message[..len]).is_err(), "{len}");
        }
    }
}
