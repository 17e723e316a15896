//! Loans of owned, foreign and borrowed memory.

use super::*;

#[test]
fn disjoint_ranges_are_lent_at_once() {
    let memory = HostMemory::zeroed(10);
    let mut a = memory.lend(0..4).unwrap();
    let mut b = memory.lend(4..10).unwrap();
    a.fill(1);
    b.fill(2);
    assert_eq!(memory.lend(3..5).unwrap_err(), LoanError::InUse { start: 3, end: 5 });
    assert!(memory.read().is_err());
    drop((a, b));
    assert_eq!(memory.to_vec().unwrap(), [1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
}

#[test]
fn clones_are_the_same_memory_and_copies_are_not() {
    let memory = HostMemory::zeroed(4);
    assert!(memory.is_same(&memory.clone()));
    assert!(!memory.is_same(&HostMemory::zeroed(4)));
}

#[test]
fn readers_exclude_writers() {
    let memory = HostMemory::from_vec(vec![7; 4]);
    let bytes = memory.read().unwrap();
    let slice = bytes.slice(1..2);
    drop(bytes);
    assert!(memory.lend(0..1).is_err(), "a slice of the loan is still out");
    drop(slice);
    assert!(memory.lend(0..1).is_ok());
}

#[test]
fn split_buffers_return_their_own_ranges() {
    let memory = HostMemory::zeroed(6);
    let mut rest = memory.lend(0..6).unwrap();
    let front = rest.split_to(2);
    assert_eq!((front.len(), rest.len()), (2, 4));
    drop(front);
    assert!(memory.lend(0..2).is_ok());
    assert!(memory.lend(2..3).is_err());
    let empty = rest.split_to(0);
    drop((empty, rest));
    assert!(memory.lend(0..6).is_ok());
}

#[test]
fn loans_outlive_the_memory() {
    let memory = HostMemory::from_vec(vec![1, 2, 3]);
    let mut buffer = memory.lend(1..3).unwrap();
    drop(memory);
    buffer[0] = 9;
    assert_eq!(buffer.freeze(), [9, 3][..]);
}

#[test]
fn immutable_and_empty_memory() {
    let memory = HostMemory::from_bytes(Bytes::from_static(b"abc"));
    assert_eq!(memory.lend(0..1).unwrap_err(), LoanError::ReadOnly);
    assert_eq!(memory.read().unwrap(), b"abc"[..]);
    let empty = HostMemory::zeroed(0);
    let _reader = empty.read().unwrap();
    assert!(empty.lend(0..0).is_ok());
    assert!(empty.lend(0..1).is_err());
}

#[test]
fn vectors_and_buffers_of_numbers_are_not_copied() {
    let numbers = vec![1.5_f32, -2.0];
    let address = numbers.as_ptr().cast::<u8>();
    let memory = HostMemory::from_elements(numbers);
    assert_eq!(memory.read().unwrap().as_ptr(), address);
    memory.lend(4..8).unwrap().copy_from_slice(&3.0_f32.to_le_bytes());
    let elements = Elements::<f32>::of(memory.read().unwrap());
    assert_eq!((&*elements, elements.is_lent()), (&[1.5, 3.0][..], true));
    assert!(memory.lend(0..1).is_err(), "a slice of it is out");
    drop(elements);
    assert!(memory.lend(0..1).is_ok());

    let shared: Arc<[u16]> = Arc::new([1, 2, 3]);
    let memory = HostMemory::from_owner(Arc::clone(&shared));
    assert_eq!(memory.read().unwrap(), [1, 0, 2, 0, 3, 0][..]);
    assert_eq!(memory.read().unwrap().as_ptr(), shared.as_ptr().cast::<u8>());
    assert_eq!(memory.lend(0..1).unwrap_err(), LoanError::ReadOnly);
    drop(memory);
    assert_eq!(Arc::strong_count(&shared), 1);
    assert_eq!(HostMemory::from_owner([true, false]).to_vec().unwrap(), [1, 0]);
}

#[test]
fn bytes_that_are_not_aligned_are_copied() {
    let bytes = Bytes::from([0, 1_u32, 2].map(u32::to_le_bytes).concat());
    let start = usize::from(bytes.as_ptr().cast::<u32>().is_aligned());
    let elements = Elements::<u32>::of(bytes.slice(start..start + 8));
    assert!(!elements.is_lent());
    assert_eq!(elements.len(), 2);
    let truth = Elements::<bool>::of(Bytes::from_static(&[0, 1, 2]));
    assert_eq!((&*truth, truth.is_lent()), (&[false, true, true][..], false));
}

#[test]
fn a_scope_revokes_what_it_borrowed() {
    let (mut written, read) = (vec![0_i16; 3], [7_u8; 2]);
    let (a, b, empty) = scope(|scope| {
        let a = scope.borrow_mut(&mut written);
        let b = scope.borrow(&read);
        a.lend(2..4).unwrap().fill(1);
        assert_eq!(b.read().unwrap(), [7, 7][..]);
        assert_eq!(b.lend(0..1).unwrap_err(), LoanError::ReadOnly);
        let empty = a.lend(6..6).unwrap();
        (a, b, empty)
    });
    assert_eq!(written, [0, 0x101, 0]);
    drop(written);
    assert_eq!(a.lend(0..1).unwrap_err(), LoanError::Revoked);
    assert_eq!(a.read().unwrap_err(), LoanError::Revoked);
    assert_eq!(b.read().unwrap_err(), LoanError::Revoked);
    assert!(empty.is_empty() && empty.freeze().is_empty());
}

#[test]
fn a_scope_waits_for_the_loans_of_other_threads() {
    let mut numbers = [0_u32; 4];
    let (ended, at_work) = std::sync::mpsc::channel::<()>();
    scope(|scope| {
        let memory = scope.borrow_mut(&mut numbers);
        let (mut front, back) = (memory.lend(0..8).unwrap(), memory.lend(8..16).unwrap());
        std::thread::spawn(move || {
            let _ = at_work.recv();
            front.fill(2);
            drop((front, back));
        });
        // From here on the loans end at any time, before or after the closure.
        drop(ended);
    });
    assert_eq!(numbers, [0x0202_0202, 0x0202_0202, 0, 0]);
}

#[test]
fn a_panic_in_a_scope_revokes_as_well() {
    let numbers = [1_u8; 4];
    let kept = Mutex::new(None);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        scope(|scope| {
            *kept.lock().unwrap() = Some(scope.borrow(&numbers));
            panic!("in the scope");
        })
    }));
    assert!(panicked.is_err());
    let memory = kept.into_inner().unwrap().unwrap();
    assert_eq!(memory.read().unwrap_err(), LoanError::Revoked);
}
