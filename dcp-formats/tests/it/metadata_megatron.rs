//! What Megatron-Core adds to a `.metadata`: the shapes that tensors had before it flattened them.

use dcp_core::FormatError;
use dcp_formats::metadata::decode_all;
use dcp_formats::pickle::Writer;

/// Writes a value.
type Put<'a> = &'a dyn Fn(&mut Writer);

/// A `Metadata` whose one attribute is `mcore_data`.
fn with_mcore_data(put: Put<'_>) -> Result<Vec<(String, Vec<u64>)>, FormatError> {
    let mut writer = Writer::new();
    let class = "megatron.core.dist_checkpointing.strategies.torch";
    writer.global(class, "MCoreMetadata");
    writer.empty_tuple();
    writer.new_object();
    writer
        .dict(std::iter::once(()), |writer, ()| {
            writer.constant("mcore_data");
            put(writer);
            Ok::<(), FormatError>(())
        })
        .unwrap();
    writer.build();
    let decoded = decode_all(&writer.finish().unwrap())?;
    let shapes = decoded.original_shapes.iter();
    Ok(shapes.map(|(fqn, shape)| (fqn.to_string(), shape.to_vec())).collect())
}

/// One tensor's entry of `mcore_data`: the attribute of that name, and what `put` writes.
fn note(writer: &mut Writer, name: &str, put: Put<'_>) {
    let never = |_: &mut Writer| Ok::<(), FormatError>(());
    writer
        .dict(std::iter::once(()), |writer, ()| {
            writer.constant("w");
            writer.dict(std::iter::once(()), |writer, ()| {
                writer.constant(name);
                put(writer);
                never(writer)
            })
        })
        .unwrap();
}

const ORIGINAL: &str = "nd_reformulated_orig_global_shape";

#[test]
fn megatron_notes_the_shapes_of_flattened_tensors() {
    let shapes =
        with_mcore_data(&|writer| note(writer, ORIGINAL, &|writer| writer.uint_tuple(&[6, 8])));
    assert_eq!(shapes.unwrap(), [("w".to_owned(), vec![6, 8])]);
    let other = with_mcore_data(&|writer| note(writer, "later", &|writer| writer.int(3)));
    assert_eq!(other.unwrap(), []);
    assert_eq!(with_mcore_data(&|writer| writer.none()).unwrap(), []);
    assert_eq!(with_mcore_data(&|writer| writer.int(7)).unwrap(), []);
}

#[test]
fn a_shape_that_is_none_is_refused() {
    let long = vec![1; 65];
    let bad: [(Put<'_>, &str); 4] = [
        (&|writer| writer.int(6), "an int"),
        (&|writer| writer.none(), "None"),
        (&|writer| writer.uint_tuple(&long), "65 axes"),
        (
            &|writer| writer.dict([0; 0].into_iter(), |_, _| Ok::<(), FormatError>(())).unwrap(),
            "a dict",
        ),
    ];
    for (put, said) in bad {
        let error = with_mcore_data(&|writer| note(writer, ORIGINAL, put)).unwrap_err();
        let error = error.to_string();
        assert!(error.contains(said) && error.contains("\"w\""), "{error}");
    }
}
