//! Requests for objects, which differ from those for lists and other answers.

use object_store::GetOptions;

/// Marks a request in its extensions: its answer is an object, which is read piece by piece up to the
/// bytes that are needed. Any other answer is read whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObjectRead;

/// The options of a request for an object.
pub(crate) fn get_options() -> GetOptions {
    let mut options = GetOptions::new();
    options.extensions.insert(ObjectRead);
    options
}
