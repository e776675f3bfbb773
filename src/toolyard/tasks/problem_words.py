"""The words that are filled into templates."""

from __future__ import annotations

NAMES = {
    "he": (
        "Adam Ahmed Ben Carlos Daniel David Diego Emil Ethan Felix Finn George Hassan Henry Hugo Ivan Jack Jamal Jorge "
        "Kevin Leo Liam Luca Marco Max Milan Nikhil Noah Oliver Oscar Paul Peter Rafael Ravi Robin Samuel Simon Theo "
        "Victor Wei William Yuki"
    ),
    "she": (
        "Alice Amina Anna Bella Carla Chloe Clara Daisy Elena Ella Emma Fatima Freya Grace Hannah Iris Ivy Jana Julia "
        "Kate Laila Lucy Maria Maya Megan Nina Nora Olivia Petra Priya Rachel Ruby Sofia Stella Tanya Uma Vera Wendy "
        "Yara Zainab"
    ),
}
"""By their pronouns."""
THINGS = (
    "apple pear peach/peaches orange lemon mango banana cookie muffin pancake sandwich/sandwiches candy/candies egg "
    "carrot potato/potatoes tomato/tomatoes onion book comic magazine pencil crayon marker eraser notebook envelope "
    "stamp sticker card coin button bead shell stone marble balloon ball doll puzzle kite toy brick ribbon candle "
    "cup plate spoon bowl towel shirt sock scarf/scarves hat flower rose tulip seed leaf/leaves feather photo "
    "ticket badge bottle battery/batteries key lamp"
)
"""With the plural, where an s does not make it."""
BOXES = "box/boxes bag basket jar crate tray packet carton bucket"
COLOURS = "red blue green yellow white black orange purple pink brown"
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
