//! Reports of written files, which the ranks of a group send to rank 0.

use std::sync::Arc;

use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{CheckpointError, PlanError};
use dcp_jobs::group::JobGroup;
use dcp_jobs::write::ConversionReport;

const MAGIC: [u8; 4] = *b"dcu1";

/// A file that was written.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct WrittenFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) tensors: usize,
    pub(super) objects: usize,
    /// Tensors that are stored as bytes.
    pub(super) raw: Vec<Arc<str>>,
    /// Tensors that another one is written for.
    pub(super) tied: Vec<Arc<str>>,
}

impl WrittenFile {
    pub(super) fn new(name: String, report: ConversionReport) -> Self {
        Self {
            bytes: report.files.get(&name).copied().unwrap_or_default(),
            name,
            tensors: report.tensors,
            objects: report.objects,
            raw: report.raw,
            tied: report.tied.into_keys().collect(),
        }
    }
}

/// The files of all ranks, in the order of ranks, on rank 0; nothing on others.
pub(super) async fn gather(
    group: &JobGroup,
    mine: &[WrittenFile],
) -> Result<Option<Vec<WrittenFile>>, CheckpointError> {
    let Some(messages) = group.gather(encode(mine).finish()).await? else { return Ok(None) };
    let mut all = Vec::new();
    for message in &messages {
        all.extend(decode(message)?);
    }
    Ok(Some(all))
}

/// Waits until rank 0 has made room for the files.
pub(super) async fn room_made(group: &JobGroup) -> Result<(), CheckpointError> {
    group.broadcast(MessageWriter::new(MAGIC).finish()).await.map(drop)
}

fn encode(files: &[WrittenFile]) -> MessageWriter {
    let mut out = MessageWriter::new(MAGIC);
    out.number(files.len() as u64);
    for file in files {
        out.text(&file.name);
        out.numbers(&[file.bytes, file.tensors as u64, file.objects as u64]);
        for names in [&file.raw, &file.tied] {
            out.number(names.len() as u64);
            names.iter().for_each(|name| out.text(name));
        }
    }
    out
}

fn decode(message: &[u8]) -> Result<Vec<WrittenFile>, PlanError> {
    let mut input = MessageReader::new(message, MAGIC)?;
    let mut files = Vec::new();
    for _ in 0..input.count()? {
        let name = input.text()?.to_owned();
        let bytes = input.number()?;
        let mut count = || {
            usize::try_from(input.number()?)
                .map_err(|_| PlanError::message("the files of a rank", "a number is too large"))
        };
        let (tensors, objects) = (count()?, count()?);
        let mut names = || {
            let count = input.count()?;
            (0..count).map(|_| input.text().map(Arc::from)).collect::<Result<Vec<_>, PlanError>>()
        };
        let (raw, tied) = (names()?, names()?);
        files.push(WrittenFile { name, bytes, tensors, objects, raw, tied });
    }
    input.finish()?;
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_arrive_as_they_were_sent() {
        let file = WrittenFile {
            name: "model/chunk-00000.pt".to_owned(),
            bytes: 1 << 40,
            tensors: 300,
            objects: 2,
            raw: vec!["x".into()],
            tied: vec!["y".into(), "z".into()],
        };
        let files = vec![file, WrittenFile::default()];
        let message = encode(&files).finish();
        assert_eq!(decode(&message).unwrap(), files);
        for len in 0..message.len() {
            assert!(decode(&message[..len]).is_err(), "{len}");
        }
    }
}
