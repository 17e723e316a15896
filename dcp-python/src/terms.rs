//! Setters and jobs of the library, as Python names them.
//!
//! A message of the library names what a program in Rust calls, in backticks: `Destination::overwrite`. This table has
//! the keyword arguments and functions of Python. What only the `dcp` command has, which the package installs as well,
//! is named as the command names it.

use std::borrow::Cow;

/// Texts of the library, and of the package in their place. None has a character that JSON escapes.
const TERMS: &[(&str, &str)] = &[
    ("`Checkpoint::convert`", "`Checkpoint.convert`"),
    ("`Checkpoint::inspect`", "`Checkpoint.inspect`"),
    ("`Checkpoint::verify`", "`Checkpoint.verify`"),
    ("`Destination::compression`", "`compress=`"),
    ("`Destination::config`", "`config=`"),
    ("`Destination::dtype`", "`dtype=`"),
    ("`Destination::max_shard_bytes`", "`max_shard_bytes=`"),
    ("`Destination::overwrite`", "`overwrite=True`"),
    ("`Destination::ranks`", "`ranks=`"),
    ("`Destination::to`", "`to=`"),
    ("`JobOptions::max_memory`", "`max_memory=`"),
    ("`JobOptions::parallelism`", "`parallelism=`"),
    ("`KeepBest`", "`keep_best=` with `metric=`"),
    ("`Keys::exclude`", "`exclude=`"),
    ("`Keys::include`", "`include=`"),
    ("`Keys::rename`", "`rename=`"),
    ("`Opener::list`", "`distcp.ls`"),
    ("`Opener::rank`", "`distcp.open(rank=)`"),
    ("`Opener::variant`", "`distcp.open(variant=)`"),
    ("`StatePart::Everything`", "`part=everything`"),
    ("`StatePart::Model`", "`part=model`"),
    ("`StatePart::WithoutOptimizer`", "`part=without_optimizer`"),
    ("`StepOrder::Step`", "`by=step`"),
    ("`StepOrder::Time`", "`by=time`"),
    ("`Verification::deep`", "`Checkpoint.verify(deep=True)`"),
    ("`exclude`", "`exclude=`"),
    ("`include`", "`include=`"),
    ("`merge`", "`distcp.merge`"),
    ("`rename`", "`rename=`"),
];

/// A message of the library with the names of Python.
pub(crate) fn of_python(message: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(message);
    for (library, python) in TERMS {
        if text.contains(library) {
            text = Cow::Owned(text.replace(library, python));
        }
    }
    match dcp_cli::of_command(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(text) => Cow::Owned(text),
    }
}
