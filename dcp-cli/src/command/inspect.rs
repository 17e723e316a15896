//! `dcp inspect`.

use dcp::checkpoint::{Checkpoint, Need};
use dcp::convert::{ConvertError, JobOptions, KeySummary, Source, Summary, unmatched_patterns};
use dcp::core::{Key, Quoted, StorageExt as _};
use dcp::megatron::{COMMON_STATE, Description, METADATA_JSON, MegatronCheckpoint, MegatronFormat};
use futures_util::StreamExt as _;
use indexmap::IndexMap;
use serde::Serialize;

use crate::args;
use crate::failure::{Exit, Failure};
use crate::output::Output;
use crate::render::{megatron, shards, tree};
use crate::session::Session;

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

pub(crate) fn inspect(args: &args::Inspect, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let (summary, megatron) = session.run(false, async {
        let opened = session.open(&args.uri, Need::Readable).await?;
        let source = opened.source();
        if !args.json {
            session.note_ambiguity(&args.uri).await?;
        }
        let megatron = match opened.megatron() {
            Some(checkpoint) => Some(checkpoint.describe().await?),
            None => None,
        };
        let options = JobOptions::default();
        if let Some(fqn) = &args.shards {
            // Looks the name up as `get` does, so that a typo gets the same advice.
            dcp::convert::find(source, fqn, None).await?;
            let summary = dcp::convert::inspect(source, &options, |name| name == fqn).await?;
            return Ok((summary, megatron));
        }
        if args.common || args.args {
            if megatron.is_none() {
                return Err(no_common(args, &opened).await);
            }
            let common = |name: &str| name == COMMON_STATE;
            return Ok((dcp::convert::inspect(source, &options, common).await?, megatron));
        }
        let wanted = |name: &str| args.filter.as_ref().is_none_or(|glob| matches(glob, name));
        let mut summary = dcp::convert::inspect(source, &options, wanted).await?;
        if megatron.is_some() {
            summary.version = None;
        }
        if summary.keys.is_empty()
            && !args.json
            && let Some(glob) = &args.filter
        {
            return Err(no_match(glob, source).await?);
        }
        if summary.files.is_empty() && args.filter.is_none() {
            summary.files = rank_files(&opened).await?;
        }
        Ok((summary, megatron))
    })?;
    for one in &summary.callables {
        out.note(&format!("Python would run {one}, when it loads the checkpoint"));
    }
    if !args.json {
        summary.unfinished.iter().for_each(|problem| out.note(problem));
    }
    if args.common || args.args {
        return common_state(args, &summary, out);
    }
    if args.json {
        return out.json(&WithMegatron { summary: &summary, megatron: megatron.as_ref() });
    }
    if let Some(fqn) = &args.shards {
        return match summary.keys.get(fqn.as_str()) {
            Some(KeySummary::Tensor(tensor)) => out.write(&shards::render(fqn, tensor, out)),
            _ => Err(Failure::from(ConvertError::Unsupported {
                what: format!("{fqn:?}"),
                problem: "is no tensor, so it has no shards".to_owned(),
            })),
        };
    }
    let Some(description) = &megatron else {
        return out.write(&tree::render(&args.uri, &summary, "", args.all, out));
    };
    let facts = match args.filter {
        Some(_) => String::new(),
        None => megatron::facts(description, out),
    };
    let shown = match args.all {
        true => summary,
        false => megatron::grouped(summary, &description.objects),
    };
    out.write(&tree::render(&args.uri, &shown, &facts, args.all, out))
}

/// The files of the ranks of an old checkpoint of Megatron's, whose merged tensors lie in none.
async fn rank_files(opened: &Checkpoint) -> Result<IndexMap<String, Option<u64>>, Failure> {
    let mut files = IndexMap::new();
    let format = opened.megatron().map(MegatronCheckpoint::format);
    if !matches!(format, Some(MegatronFormat::Legacy { .. })) {
        return Ok(files);
    }
    let mut objects = opened.storage().list(None);
    while let Some(meta) = objects.next().await {
        let meta = meta?;
        let name = meta.key.as_str();
        if name.starts_with("mp_rank_") && name.ends_with(".pt") {
            files.insert(name.to_owned(), Some(meta.byte_len));
        }
    }
    files.sort_unstable_keys();
    Ok(files)
}

/// The output of `--json`: fields of a summary, and what Megatron-Core's checkpoints have besides.
#[derive(Serialize)]
struct WithMegatron<'a> {
    #[serde(flatten)]
    summary: &'a Summary,
    #[serde(skip_serializing_if = "Option::is_none")]
    megatron: Option<&'a Description>,
}

/// The common state that was asked for where there is none.
async fn no_common(args: &args::Inspect, opened: &Checkpoint) -> Failure {
    let option = if args.args { "--args" } else { "--common" };
    let is_folder = opened.source().dcp_reader().is_some();
    if is_folder
        && let Ok(config) = Key::new(METADATA_JSON)
        && opened.storage().contains(&config).await.unwrap_or(false)
    {
        let message = format!(
            "{} has no common state that can be told: its {METADATA_JSON} does not name the \
             backends of Megatron-Core, because it is damaged or of another program",
            Quoted(&args.uri)
        );
        return Failure::new(Exit::Bad, message)
            .hint(format!("without {option} the command shows what else there is"));
    }
    let message =
        format!("{option} is for checkpoints of Megatron-Core, and {:?} is none", args.uri);
    Failure::new(Exit::Usage, message).hint("leave it out to see what there is")
}

/// Prints the common state, or only the arguments in it.
fn common_state(args: &args::Inspect, summary: &Summary, out: &Output) -> Result<(), Failure> {
    let state = summary.keys.get(COMMON_STATE);
    let bad = |what: &str| Failure::new(Exit::Bad, format!("{:?} has no {what}", args.uri));
    let Some(KeySummary::Object { value }) = state else { return Err(bad("common state")) };
    let Some(state) = megatron::plain_dict(value) else {
        return Err(bad("common state that is a dict"));
    };
    if !args.args {
        return match args.json {
            true => out.json(state),
            false => out.write(&megatron::common(state, out)),
        };
    }
    let Some(arguments) = state.get("args").and_then(megatron::plain_dict) else {
        return Err(
            bad("arguments in its common state").hint("`dcp inspect --common` shows what there is")
        );
    };
    match args.json {
        true => out.json(arguments),
        false => out.write(&megatron::arguments(arguments, out)),
    }
}

/// Whether `name` is like `glob`, in which `*` stands for any text and `?` for one character.
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
