//! `dcp ls`.

use clap::Args;

use crate::failure::Failure;
use crate::output::render::run;
use crate::session::Session;

/// List the checkpoints in a directory: steps, whether whole, size, age, kind.
///
/// Recognizes the steps of OLMo-core, Megatron-LM and Megatron-Core, folders of PyTorch's DCP
/// (torchtitan, Lightning, Hugging Face's trainer with FSDP), Hugging Face folders and files of
/// torch.save. Names and lengths show whether a checkpoint is whole; for the last two formats, small
/// indexes are read as well. `dcp verify` checks more.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp ls runs/my-run
  dcp ls runs/my-run --json | jq -r .latest
  dcp ls runs/my-run --json | jq -r '.entries[] | select(.complete == false) | .name'

JSON:
  {\"entries\": [ENTRY, …], \"latest\": NAME, \"other\": N, \"truncated\": BOOL}
  and \"tracker_problem\" where the tracker of a Megatron-LM run names no complete checkpoint,
  \"unread\": {NAME: REASON} where links that are not followed belong to none of the entries.
  ENTRY is {\"name\", \"kind\", \"complete\", \"problem\", \"step\", \"ephemeral\", \"version\",
            \"files\", \"bytes\", \"modified\", \"checkpoint\"}; kind is one of olmo, dcp,
            megatron, huggingface, torch_save, torch_save_file; modified is in seconds since 1970;
            checkpoint is what to open, relative to the directory; \"strays\": [NAME, …] where only
            files have a problem that are none of the checkpoint: it counts as complete.")]
pub(crate) struct Ls {
    /// The directory of a run, or any other with checkpoints in it.
    uri: String,

    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

pub(crate) fn ls(args: &Ls, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let (listing, order) = session.run(false, async {
        let listing = session.opener().list(&args.uri).await?;
        let mut order = None;
        if !args.json {
            session.note_ambiguity(&args.uri).await?;
            // What cannot be read of a checkpoint does not keep the others from being listed.
            let note = session.opener().run(&args.uri).order_note(&listing).await;
            order = note.unwrap_or_default();
        }
        Ok((listing, order))
    })?;
    if args.json {
        return out.json(&listing);
    }
    out.write(&run::render(&args.uri, &listing, out))?;
    if let Some(problem) = &listing.tracker_problem {
        out.note(problem);
    }
    for (file, reason) in &listing.unread {
        out.note(&format!("not looking into {:?}: {reason}", file));
    }
    if let Some(order) = order {
        out.note(&format!("{order}; `dcp prune` deletes with --by step or --by time"));
    }
    if listing.truncated {
        out.note("listing truncated; sizes and marks are partial");
    }
    Ok(())
}
