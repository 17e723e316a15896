//! `dcp inspect`.

use dcp::convert::{ConvertError, JobOptions, KeySummary};

use crate::args;
use crate::failure::{Exit, Failure};
use crate::open::{self, Need};
use crate::output::Output;
use crate::render::{shards, tree};

pub(crate) fn inspect(args: &args::Inspect, out: &Output) -> Result<(), Failure> {
    let summary = open::run(false, async {
        let source = open::source(&args.uri, Need::Readable).await?;
        if !args.json {
            open::say_which(&args.uri, out).await?;
        }
        let options = JobOptions::default();
        if let Some(fqn) = &args.shards {
            // Looks the name up as `get` does, so that a typo gets the same advice.
            dcp::convert::find(&source, fqn, None).await?;
            return Ok(dcp::convert::inspect(&source, &options, |name| name == fqn).await?);
        }
        let wanted = |name: &str| args.filter.as_ref().is_none_or(|glob| matches(glob, name));
        Ok(dcp::convert::inspect(&source, &options, wanted).await?)
    })?;
    if args.json {
        return out.json(&summary);
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
    if summary.keys.is_empty()
        && let Some(glob) = &args.filter
    {
        return Err(Failure::new(Exit::Usage, format!("no name matches {glob:?}"))
            .hint("`dcp inspect` without --filter lists the names there are"));
    }
    out.write(&tree::render(&args.uri, &summary, args.all, out))
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
