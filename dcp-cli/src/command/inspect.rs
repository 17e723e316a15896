//! `dcp inspect`.

use dcp::checkpoint::Need;
use dcp::convert::{ConvertError, KeySummary, Source, unmatched_patterns};

use crate::cli as args;
use crate::failure::{Exit, Failure};
use crate::output::render::{megatron, shards, tree};
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
    if args.common || args.args {
        return common_state(args, session);
    }
    let inspected = session.run(false, async {
        let opened = session.open(&args.uri, Need::Readable).await?;
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
    let summary = &inspected.summary;
    for one in &summary.callables {
        out.note(&format!("Python would run {one}, when it loads the checkpoint"));
    }
    if !args.json {
        summary.unfinished.iter().for_each(|problem| out.note(problem));
    }
    if args.json {
        return out.json(&inspected);
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
    let Some(description) = &inspected.megatron else {
        return out.write(&tree::render(&args.uri, summary, "", args.all, out));
    };
    let facts = match args.filter {
        Some(_) => String::new(),
        None => megatron::facts(description, out),
    };
    let shown = match args.all {
        true => inspected.summary,
        false => megatron::grouped(inspected.summary, &description.objects),
    };
    out.write(&tree::render(&args.uri, &shown, &facts, args.all, out))
}

/// Prints the common state, or only the arguments in it.
fn common_state(args: &args::Inspect, session: &Session) -> Result<(), Failure> {
    let out = &session.out;
    let state = session.run(false, async {
        let opened = session.open(&args.uri, Need::Readable).await?;
        if !args.json {
            session.note_ambiguity(&args.uri).await?;
        }
        let state = match args.args {
            true => opened.arguments().await?,
            false => opened.common_state().await?,
        };
        Ok(state)
    })?;
    match (args.json, args.args) {
        (true, _) => out.json(&state),
        (false, true) => out.write(&megatron::arguments(&state, out)),
        (false, false) => out.write(&megatron::common(&state, out)),
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
