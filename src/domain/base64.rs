//! Base64 decoder for the credentials of HTTP Basic (<https://www.rfc-editor.org/rfc/rfc4648#section-4>).
//!
//! It decodes only complete text. Other alphabets, blanks, missing or misplaced padding and leftover bits give `None`.

/// The decoded bytes; `None` for invalid text.
pub fn decode(text: &[u8]) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    let digits = &text[..text.len() - padding];
    if padding > 2 {
        return None;
    }
    let (mut bytes, mut bits, mut have) = (Vec::with_capacity(text.len() / 4 * 3), 0_u32, 0);
    for digit in digits {
        bits = (bits << 6) | u32::from(value(*digit)?);
        have += 6;
        if have >= 8 {
            have -= 8;
            bytes.push(u8::try_from(bits >> have).ok()?);
            bits &= (1 << have) - 1;
        }
    }
    (bits == 0).then_some(bytes)
}

fn value(digit: u8) -> Option<u8> {
    match digit {
        b'A'..=b'Z' => Some(digit - b'A'),
        b'a'..=b'z' => Some(digit - b'a' + 26),
        b'0'..=b'9' => Some(digit - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc_vectors_decode_and_broken_text_fails() {
        // <https://www.rfc-editor.org/rfc/rfc4648#section-10>
        let vectors =
            [("", ""), ("Zg==", "f"), ("Zm8=", "fo"), ("Zm9v", "foo"), ("Zm9vYg==", "foob"), ("Zm9vYmFy", "foobar")];
        for (text, bytes) in vectors {
            assert_eq!(decode(text.as_bytes()).as_deref(), Some(bytes.as_bytes()), "{text}");
        }
        assert_eq!(decode(b"//79+w=="), Some(vec![0xff, 0xfe, 0xfd, 0xfb]));
        for broken in ["Z", "Zg", "Zg=", "Zg=a", "====", "Zh==", "Z===", "Zm9v ", "Zm-_"] {
            assert_eq!(decode(broken.as_bytes()), None, "{broken}");
        }
    }
}
