//! `dcp inspect`.

use clap::Args;
use dcp::core::format::WantedKeys;
use dcp::jobs::Need;
use dcp::jobs::inspect::{Inspected, KeySummary, Summary};
use dcp::jobs::keys::unmatched_patterns;
use dcp::jobs::{JobError, Source};
use dcp::megatron::jobs::Description;

use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::output::render::{megatron, plugin, shards, tree};
use crate::session::Session;

/// Show what a checkpoint holds.
///
/// Prints the tree of its tensors and objects with dtype, shape, bytes and number of shards, and
/// its files, and what dcp noted when it saved the checkpoint. No tensor data is read, so it is quick
/// however large the checkpoint is. The exit code is 1 if it is not whole: a file is missing or has
/// another length than its index or header says, as for `dcp ls`.
#[derive(Args, Debug)]
#[command(after_long_help = "\
Examples:
  dcp inspect runs/step_1000
  dcp inspect runs/step_1000 --filter 'model.*'
  dcp inspect runs/step_1000 --shards model.embed.weight
  dcp inspect runs/step_1000 --json | jq '.keys | length'
  dcp inspect run/iter_0001000 --args                 what a run of Megatron-LM was started with
  dcp inspect run --json | jq .megatron.parallel

JSON:
  {\"format\": …, \"keys\": {FQN: KEY, …}, \"files\": {NAME: BYTES, …}, \"callables\": [CALLABLE, …],
   \"unfinished\": [TEXT, …], \"sidecar\": SIDECAR, \"problem\": why it is not whole}
  KEY is {\"kind\": \"tensor\", \"dtype\", \"shape\", \"bytes\",
          \"chunks\": [{\"offsets\", \"sizes\", \"file\", \"byte_offset\", \"byte_len\"}, …],
          \"device\": where torch.load puts it, if not on the CPU}
      or {\"kind\": \"object\", \"value\"}; a value that JSON lacks is tagged {\"type\": …, …}.
  CALLABLE is {\"key\", \"path\", \"name\", \"dangerous\"}: what Python runs when it loads that object,
  and is not known to be harmless; `dangerous` ones are known to run commands or code. What there is
  none of is left out; \"unfinished\" says what is missing of a Hugging Face model.
  SIDECAR is {\"state\": \"found\", \"tool\", \"world_size\", \"mesh\": {NAME: SIZE, …}, \"step\",
  \"parent_step\", \"checksums\": {\"covered\", \"of\"}, \"digests\": {\"covered\", \"of\"}}: what a save of
  dcp noted, and of what is shown the chunks and objects with a CRC-32 and files with a SHA-256; or
  the state is \"absent\", as of PyTorch's saves, or \"damaged\", with the \"problem\". Only folders of
  `.metadata` have it.
  dtypes have PyTorch's names without `torch.`; the bytes of a missing file are null.
  Of Megatron-Core's checkpoints there is \"megatron\", too: \"format\", \"written_by\", \"read_by\",
  \"iteration\", \"parallel\", \"layers\", \"optimizer\", \"objects\", …; --common and --args print
  the common state and the arguments instead.")]
pub(crate) struct Inspect {
    /// The checkpoint.
    pub(crate) uri: String,

    /// Print one JSON object.
    #[arg(long)]
    pub(crate) json: bool,

    /// Draw how the chunks of this tensor lie in it, and list which file holds each.
    #[arg(long, value_name = "FQN", conflicts_with = "json")]
    pub(crate) shards: Option<String>,

    /// Show only names that match: `*` matches any text, `?` one character.
    #[arg(long, value_name = "GLOB")]
    pub(crate) filter: Option<String>,

    /// Print the common state of a checkpoint of Megatron-Core, all but the arguments in it.
    #[arg(long, conflicts_with_all = ["shards", "filter", "all"])]
    pub(crate) common: bool,

    /// Print the arguments that the run of a checkpoint of Megatron-Core was started with.
    #[arg(long, conflicts_with_all = ["shards", "filter", "all", "common"])]
    pub(crate) args: bool,

    /// Show every layer, also those that are alike, and every sharded object.
    #[arg(long)]
    pub(crate) all: bool,
}

/// The error of a filter that shows nothing.
async fn no_match(glob: &str, source: &Source) -> Result<Failure, Failure> {
    let metadata = source.metadata().await?;
    let names: Vec<_> = metadata.iter().map(|(fqn, _)| (&**fqn, None)).collect();
    let unmatched = unmatched_patterns("filter", &[glob.to_owned()], &names);
    let hint = match unmatched.into_iter().find_map(|one| one.nearest) {
        Some(nearest) => format!("did you mean {nearest:?}?"),
        None => "`dcp inspect` without --filter lists the names there are".to_owned(),
    };
    Ok(Failure::new(Exit::Usage, format!("no name matches {glob:?}")).hint(hint))
}

pub(crate) fn inspect(args: &Inspect, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    if args.common || args.args {
        return common_state(args, session);
    }
    let keys = match (&args.shards, &args.filter) {
        (Some(fqn), _) => Some(WantedKeys::one(fqn)),
        (None, Some(glob)) => {
            let glob = glob.clone();
            Some(WantedKeys::new(move |name| matches(&glob, name)))
        }
        (None, None) => None,
    };
    let inspected = session.run(false, async {
        let opened = session.open_for(&args.uri, Need::Readable, keys).await?;
        if !args.json {
            session.note_ambiguity(&args.uri).await?;
        }
        let inspection = opened.inspect();
        let inspection = match (&args.shards, &args.filter) {
            (Some(fqn), _) => inspection.key(fqn),
            (None, Some(glob)) => inspection.filter(|name| matches(glob, name)),
            (None, None) => inspection,
        };
        let inspected = inspection.run().await?;
        if inspected.summary.keys.is_empty()
            && !args.json
            && let Some(glob) = &args.filter
        {
            return Err(no_match(glob, opened.source()).await?);
        }
        Ok(inspected)
    })?;
    let (summary, problem) = (&inspected.summary, inspected.problem.clone());
    for one in &summary.callables {
        out.note(&format!("Python would run {one}, when it loads the checkpoint"));
    }
    if !args.json {
        summary.unfinished.iter().for_each(|problem| out.note(problem));
    }
    show(args, inspected, out)?;
    match problem {
        Some(problem) => {
            Err(Failure::new(Exit::Bad, format!("{:?} is not whole: {problem}", args.uri))
                .hint("`dcp verify` lists all that is wrong with it"))
        }
        None => Ok(()),
    }
}

/// Names the chunks that have no file: the framework of the checkpoint puts them together when they are read.
fn name_assembled(summary: &mut Summary) {
    for key in summary.keys.values_mut() {
        let KeySummary::Tensor(tensor) = key else { continue };
        let nowhere = tensor.chunks.iter_mut().filter(|chunk| chunk.file.is_none());
        nowhere.for_each(|chunk| chunk.file = Some("assembled".to_owned()));
    }
}

/// Prints what there is, also of a checkpoint that is not whole.
fn show(args: &Inspect, mut inspected: Inspected, out: &Output) -> Result<(), Failure> {
    if args.json {
        return out.json(&inspected);
    }
    if inspected.framework.is_some() {
        name_assembled(&mut inspected.summary);
    }
    let summary = &inspected.summary;
    if let Some(fqn) = &args.shards {
        return match summary.keys.get(fqn.as_str()) {
            Some(KeySummary::Tensor(tensor)) => out.write(&shards::render(fqn, tensor, out)),
            _ => Err(Failure::from(JobError::NotATensor { fqn: fqn.clone(), part: "shards" })),
        };
    }
    let description = inspected.framework.as_ref().and_then(|of| of.get::<Description>());
    let facts = match (&args.filter, description, &inspected.framework) {
        (Some(_), _, _) | (None, None, None) => String::new(),
        (None, Some(description), _) => megatron::facts(description, out),
        (None, None, Some(report)) => plugin::facts(report, out),
    };
    let Some(description) = description else {
        return out.write(&tree::render(&args.uri, summary, &facts, args.all, out));
    };
    let shown = match args.all {
        true => inspected.summary,
        false => megatron::grouped(inspected.summary, &description.objects),
    };
    out.write(&tree::render(&args.uri, &shown, &facts, args.all, out))
}

/// Prints the common state, or only the arguments in it.
fn common_state(args: &Inspect, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let state = session.run(false, async {
        let opened = session.open(&args.uri, Need::Readable).await?;
        if !args.json {
            session.note_ambiguity(&args.uri).await?;
        }
        let state = match args.args {
            true => dcp::megatron::framework::arguments(&opened).await?,
            false => dcp::megatron::framework::common_state(&opened).await?,
        };
        Ok(state)
    })?;
    match (args.json, args.args) {
        (true, _) => out.json(&state),
        (false, true) => out.write(&megatron::arguments(&state, out)),
        (false, false) => out.write(&megatron::common(&state, out)),
    }
}

/// Whether `name` is like `glob`, in which `*` matches any text and `?` one character.
fn matches(glob: &str, name: &str) -> bool {
    let (glob, name): (Vec<char>, Vec<char>) = (glob.chars().collect(), name.chars().collect());
    let (mut at, mut here) = (0, 0);
    // Where to try again: behind the last star, and one character further in the name.
    let mut retry: Option<(usize, usize)> = None;
    while let Some(c) = name.get(here) {
        match glob.get(at) {
            Some('*') => {
                at += 1;
                retry = Some((at, here + 1));
            }
            Some(g) if g == c || *g == '?' => {
                at += 1;
                here += 1;
            }
            _ => match retry {
                Some((star, next)) => {
                    at = star;
                    here = next;
                    retry = Some((star, next + 1));
                }
                None => return false,
            },
        }
    }
    glob.iter().skip(at).all(|g| *g == '*')
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn globs() {
        for (glob, name, expected) in [
            ("*", "", true),
            ("model.*", "model.norm.weight", true),
            ("*.weight", "model.norm.weight", true),
            ("*.bias", "model.norm.weight", false),
            ("layers.?.w", "layers.3.w", true),
            ("layers.?.w", "layers.13.w", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b-", false),
            ("", "x", false),
            ("exact", "exact", true),
        ] {
            assert_eq!(matches(glob, name), expected, "{glob} {name}");
        }
    }
}
