//! The rule of jobs that write a new checkpoint: a source that `Opener::list` calls incomplete is refused.
//!
//! The reader of a format sees one index and its files. The commit of a step, a shard that no index names, a part
//! beside the one that is opened: all this only the examination of the whole folder sees, and a target made
//! without it would look whole. Four sources pass with a note, since their result is right: one whose missing part
//! no selected key needs, a model beside a damaged variant or optimizer of it, a checkpoint beside a damaged file that
//! its index does not name, and, in a job that writes plain tensors, a save of Megatron-Core without its last file.

use dcp_core::text::Quoted;
use dcp_formats::hf::{Weights, model_is_whole};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::notes::Notes;
use crate::checkpoint::uri::below;
use crate::error::{Error, ErrorKind};
use crate::keys::StatePart;
use crate::options::JobOptions;

/// Refuses a source that is not complete, and one of several parts when the job writes
/// [`Everything`](StatePart::Everything), as only one of them is open. On ranks, rank 0 reads the headers, and all
/// ranks fail with it.
pub(crate) async fn refuse_incomplete(
    checkpoint: &Checkpoint,
    part: StatePart,
    job: &JobOptions,
    notes: &mut Notes,
) -> Result<(), Error> {
    if let Some(unfinished) = &checkpoint.unfinished {
        let message = format!("{:?} {}", checkpoint.uri, unfinished.description);
        return Err(Error::new(ErrorKind::Unfinished, message).with_hint(unfinished.remedy.clone()));
    }
    if let Some(problem) = checkpoint.lost_commit().await? {
        let message = format!("{:?} is not whole: {problem}", checkpoint.uri);
        let hint = format!(
            "take another step; {} is read by its own path, without what is around it",
            Quoted(&checkpoint.place)
        );
        return Err(Error::new(ErrorKind::Unfinished, message).with_hint(hint));
    }
    refuse_parts(checkpoint, part)?;
    if !job.is_coordinator() || checkpoint.opener.variant.is_some() {
        return Ok(());
    }
    let examined = checkpoint.examined().await?;
    let Some(problem) = examined.problem else { return Ok(()) };
    let opens =
        checkpoint.is_model_folder() && model_is_whole(&checkpoint.step, Weights::Main).await?;
    if opens || examined.opens || !checkpoint.has_all_keys {
        notes.say(format!("{:?} is not whole, but what is read of it: {problem}", checkpoint.uri));
        return Ok(());
    }
    let message = format!("{:?} is not whole: {problem}", checkpoint.uri);
    Err(Error::new(ErrorKind::Damaged, message).with_hint(
        "copy the files again, or take another checkpoint; `Checkpoint::verify` names everything \
         that is wrong",
    ))
}

/// Refuses to write everything of a checkpoint of several parts, such as the model and the optimizer of accelerate.
fn refuse_parts(checkpoint: &Checkpoint, part: StatePart) -> Result<(), Error> {
    let mut others = checkpoint.other_parts();
    if part != StatePart::Everything || others.is_empty() {
        return Ok(());
    }
    others.sort();
    let names: Vec<String> = others.iter().map(|one| format!("{one:?}")).collect();
    let message = format!(
        "{:?} has several checkpoints that belong together, and {} alone is open: {} would be left out",
        checkpoint.uri,
        Quoted(&checkpoint.place),
        names.join(", ")
    );
    let paths = others.iter().map(|one| below(&checkpoint.step_uri, one));
    let paths: Vec<String> = std::iter::once(checkpoint.place.clone()).chain(paths).collect();
    let hint = format!(
        "`merge` of {} writes all of them; a part is read by its own path",
        paths.iter().map(|path| Quoted(path).to_string()).collect::<Vec<_>>().join(", ")
    );
    Err(Error::new(ErrorKind::Undecided, message).with_hint(hint))
}
