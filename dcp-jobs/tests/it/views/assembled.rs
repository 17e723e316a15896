//! Tensors put together from pieces, against the same thing done element by element.

use dcp_core::{Dims, Region};
use dcp_jobs::view::{Assembled, AssembledBuilder, Piece, PieceFrom};

use super::*;

fn region<const N: usize>(offsets: [u64; N], sizes: [u64; N]) -> Region {
    Region::new(offsets, sizes).unwrap()
}

fn full(shape: &[u64]) -> Region {
    Region::full(shape).unwrap()
}

/// Numbers that encode their place.
fn numbered(count: u64) -> Vec<u16> {
    (0..count).map(|n| u16::try_from(n + 1).unwrap()).collect()
}

fn bytes(numbers: &[u16]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// A checkpoint with `grid` of `[layers, rows, columns]` and `flat` of as many numbers.
fn source([layers, rows, columns]: [u64; 3], ranks: u32) -> Source {
    let count = layers * rows * columns;
    let data = bytes(&numbered(count));
    let tensors = Tensors::from([
        ("grid".to_owned(), (DType::UInt16, vec![layers, rows, columns], data.clone())),
        ("flat".to_owned(), (DType::UInt16, vec![count], data)),
    ]);
    checkpoint(&tensors, ranks)
}

fn assemble(parts: &[Source], add: impl FnOnce(&mut AssembledBuilder)) -> Source {
    block_on(async {
        let mut view = Assembled::builder(parts, &options()).await.unwrap();
        add(&mut view);
        view.finish().unwrap()
    })
}

fn entry(view: &AssembledBuilder, part: usize, fqn: &str) -> usize {
    view.part(part).unwrap().index_of(fqn).unwrap()
}

fn resharded(source: &Source, ranks: u32) -> Source {
    block_on(async {
        let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
        let writer = DcpWriter::builder(Arc::clone(&storage)).build();
        reshard(source, &writer, ranks, &options()).await.unwrap();
        Source::dcp(storage, false)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn pieces_end_up_where_they_belong(
        shape in [1_u64..4, 1_u64..7, 1_u64..7],
        ranks in 1_u32..4,
        cut_again in 1_u32..5,
        order in any::<u64>(),
        padding in 0_u64..3,
    ) {
        let [layers, rows, columns] = shape;
        let source = source(shape, ranks);
        let numbers = numbered(layers * rows * columns);
        let at = |l: u64, r: u64, c: u64| numbers[((l * rows + r) * columns + c) as usize];
        let layer = order % layers;
        let row = |r: u64| (r + order) % rows;
        let view = assemble(&[source.clone(), source], |view| {
            let (grid, flat) = (entry(view, 0, "grid"), entry(view, 1, "flat"));
            let unstacked = PieceFrom::Box {
                part: 0,
                entry: grid,
                region: region([layer, 0, 0], [1, rows, columns]),
                axes: vec![Some(2), Some(1)],
            };
            let piece = Piece { region: full(&[columns, rows]), from: unstacked };
            view.tensor("transposed", None, DType::UInt16, [columns, rows], vec![piece]).unwrap();

            // Rows in another order, one by one, a layer with an axis that was not there.
            let rows_moved = (0..rows).map(|r| {
                let from = region([layer, row(r), 0], [1, 1, columns]);
                let axes = vec![None, Some(1), Some(2)];
                let from = PieceFrom::Box { part: 0, entry: grid, region: from, axes };
                Piece { region: region([0, r, 0], [1, 1, columns]), from }
            });
            let shape = [1, rows, columns];
            view.tensor("moved", None, DType::UInt16, shape, rows_moved.collect()).unwrap();

            // Every layer out of the flat buffer, with padding below.
            let mut pieces = Vec::new();
            for l in 0..layers {
                let count = rows * columns;
                let from = region([l * count], [count]);
                let from = PieceFrom::Reshaped { part: 1, entry: flat, region: from };
                pieces.push(Piece { region: region([l, 0, 0], [1, rows, columns]), from });
                pieces.push(Piece::zeros(region([l, rows, 0], [1, padding, columns])));
            }
            let shape = [layers, rows + padding, columns];
            view.tensor("padded", None, DType::UInt16, shape, pieces).unwrap();

            // The grid as one row of numbers: a box that is reshaped.
            let count = layers * rows * columns;
            let from = full(&[layers, rows, columns]);
            let from = PieceFrom::Reshaped { part: 0, entry: grid, region: from };
            let piece = Piece { region: full(&[count]), from };
            view.tensor("row", None, DType::UInt16, [count], vec![piece]).unwrap();
            view.pass("same", None, 1, entry(view, 1, "grid")).unwrap();
        });
        let mut expected = Tensors::new();
        let mut expect = |name: &str, shape: Vec<u64>, numbers: Vec<u16>| {
            expected.insert(name.to_owned(), (DType::UInt16, shape, bytes(&numbers)));
        };
        let each = |outer: u64, inner: u64| (0..outer).flat_map(move |a| (0..inner).map(move |b| (a, b)));
        let transposed = each(columns, rows).map(|(c, r)| at(layer, r, c)).collect();
        expect("transposed", vec![columns, rows], transposed);
        let moved = each(rows, columns).map(|(r, c)| at(layer, row(r), c)).collect();
        expect("moved", vec![1, rows, columns], moved);
        let mut padded = Vec::new();
        for l in 0..layers {
            padded.extend(each(rows, columns).map(|(r, c)| at(l, r, c)));
            padded.extend((0..padding * columns).map(|_| 0));
        }
        expect("padded", vec![layers, rows + padding, columns], padded);
        expect("row", vec![layers * rows * columns], numbers.clone());
        expect("same", shape.to_vec(), numbers.clone());
        prop_assert_eq!(&contents(&view), &expected);
        // Read in other boxes than its pieces.
        prop_assert_eq!(&contents(&resharded(&view, cut_again)), &expected);
    }
}

#[test]
fn pieces_that_do_not_fit_are_refused() {
    let source = source([2, 2, 3], 2);
    let refused = |shape: &[u64], dtype: DType, pieces: Vec<Piece>| {
        let shape = Dims::from(shape);
        let result = block_on(async {
            let mut view =
                Assembled::builder(std::slice::from_ref(&source), &options()).await.unwrap();
            view.tensor("new", None, dtype, shape, pieces)
        });
        result.unwrap_err().to_string()
    };
    let find = |fqn: &str| block_on(source.metadata()).unwrap().index_of(fqn).unwrap();
    let (grid, flat) = (find("grid"), find("flat"));
    let rows = |at: u64| Piece {
        region: region([at, 0], [1, 3]),
        from: PieceFrom::Reshaped { part: 0, entry: flat, region: region([0], [3]) },
    };
    let of = |from: Region, axes: Vec<Option<usize>>| Piece {
        region: full(&[2, 3]),
        from: PieceFrom::Box { part: 0, entry: grid, region: from, axes },
    };
    let layer = || region([0, 0, 0], [1, 2, 3]);
    for (shape, dtype, pieces, words) in [
        (&[3, 3][..], DType::UInt16, vec![rows(0), rows(1)], "6 of its 9"),
        (&[2, 3], DType::UInt16, vec![rows(0), rows(0)], "two pieces"),
        (&[1, 3], DType::UInt16, vec![rows(1)], "not within its shape"),
        (&[1, 3], DType::Int16, vec![rows(0)], "int16"),
        (&[2, 3], DType::UInt16, vec![of(layer(), vec![Some(1), Some(1)])], "does not fit"),
        (&[2, 3], DType::UInt16, vec![of(layer(), vec![Some(2), Some(1)])], "does not fit"),
        (
            &[2, 3],
            DType::UInt16,
            vec![of(full(&[2, 2, 3]), vec![Some(1), Some(2)])],
            "does not fit",
        ),
        (
            &[2, 3],
            DType::UInt16,
            vec![of(region([2, 0, 0], [1, 2, 3]), vec![Some(1), Some(2)])],
            "not within",
        ),
        (&[2, 3], DType::UInt16, vec![of(full(&[2, 3]), vec![Some(0), Some(1)])], "not within"),
        (&[2, 3], DType::UInt16, vec![of(layer(), vec![Some(1), Some(7)])], "does not fit"),
    ] {
        let message = refused(shape, dtype, pieces);
        assert!(message.contains(words), "{words:?} is not in {message:?}");
    }
}

#[test]
fn the_same_pieces_are_the_same_tensor_but_zeros_are_not() {
    let view = assemble(&[source([1, 2, 2], 1)], |view| {
        let grid = entry(view, 0, "grid");
        for name in ["a", "b"] {
            let piece = Piece::same(full(&[1, 2, 2]), 0, grid, full(&[1, 2, 2]));
            view.tensor(name, None, DType::UInt16, [1, 2, 2], vec![piece]).unwrap();
        }
        for name in ["zeros", "other_zeros"] {
            let piece = Piece::zeros(full(&[4]));
            view.tensor(name, None, DType::UInt16, [4], vec![piece]).unwrap();
        }
        assert!(view.tensor("a", None, DType::UInt16, [0], Vec::new()).is_err());
        view.object("note", None, 7.into()).unwrap();
    });
    let names: Vec<String> = contents(&view).into_keys().collect();
    assert_eq!(names, ["a", "other_zeros", "zeros"], "tied tensors are written once");
    let again = resharded(&view, 2);
    let found = block_on(async { again.metadata().await.unwrap().get("note").is_some() });
    assert!(found, "an object at hand is an object of the checkpoint");
}
