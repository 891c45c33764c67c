//! A search for a text in several places, in every encoding in which a backend could show it.

use std::collections::BTreeMap;

/// Contents of the places, by name.
pub struct Places(BTreeMap<&'static str, Vec<u8>>);

impl Places {
    pub fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub fn add(&mut self, name: &'static str, bytes: impl AsRef<[u8]>) {
        let place = self.0.entry(name).or_default();
        place.extend_from_slice(bytes.as_ref());
        place.push(b'\n');
    }

    /// Names of the places that contain the text.
    pub fn with(&self, text: &str) -> Vec<&'static str> {
        let forms = forms(text);
        let holds = |bytes: &[u8]| forms.iter().any(|form| bytes.windows(form.len()).any(|window| window == form));
        self.0.iter().filter(|(_, bytes)| holds(bytes)).map(|(name, _)| *name).collect()
    }
}

/// Plain, in hexadecimal (binary columns in a dump), and in Base64 at each of its three offsets.
fn forms(text: &str) -> Vec<Vec<u8>> {
    let hex = hex::encode(text);
    let mut forms = vec![text.as_bytes().to_vec(), hex.clone().into_bytes(), hex.to_uppercase().into_bytes()];
    forms.extend((0..3).map(|offset| base64_middle(text.as_bytes(), offset)));
    forms
}

/// The part of the Base64 text that depends on these bytes alone, when `offset` bytes precede them in their group.
fn base64_middle(bytes: &[u8], offset: usize) -> Vec<u8> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let padded: Vec<u8> = vec![0; offset].into_iter().chain(bytes.iter().copied()).collect();
    let groups = padded.chunks_exact(3).skip(usize::from(offset > 0));
    let digits = groups.flat_map(|group| {
        let bits = (u32::from(group[0]) << 16) | (u32::from(group[1]) << 8) | u32::from(group[2]);
        [18, 12, 6, 0].map(|shift| DIGITS[((bits >> shift) & 63) as usize])
    });
    digits.collect()
}

#[test]
fn text_is_found_in_every_encoding() {
    // `printf 'xcanary-1234' | base64`, with none, one and two bytes before the text.
    let forms_of_it =
        ["canary-1234", "63616e6172792d31323334", "Y2FuYXJ5LTEyMzQ=", "eGNhbmFyeS0xMjM0", "eHhjYW5hcnktMTIzNA=="];
    for form in forms_of_it {
        let mut places = Places::new();
        places.add("here", format!("before {form} after"));
        places.add("there", "nothing");
        assert_eq!(places.with("canary-1234"), ["here"], "{form}");
        assert!(places.with("another-text").is_empty(), "{form}");
    }
}
