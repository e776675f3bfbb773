"""How the viewer's widgets are laid out."""

CSS = """
Screen { background: $background; }

#top { height: 1; background: $surface; color: $muted; padding: 0 1; }
#body { height: 1fr; }
#lists { width: 38%; min-width: 34; max-width: 72; background: $surface; }
.zoomed #lists, .comparing #lists { display: none; }

.heading { height: 1; padding: 0 1; color: $muted; text-style: bold; }
#titles { height: 1; background: $surface; }

Choices {
    background: $surface;
    scrollbar-size: 1 1;
    scrollbar-gutter: stable;
    overflow-x: hidden;
    scrollbar-color: $faint;
    scrollbar-background: $surface;
    scrollbar-background-hover: $surface;
    scrollbar-background-active: $surface;
}
#steps { height: auto; max-height: 35%; }
#samples { height: 1fr; }

#page {
    width: 1fr;
    background: $background;
    scrollbar-size: 1 1;
    scrollbar-gutter: stable;
    overflow-x: hidden;
    scrollbar-color: $faint;
    scrollbar-background: $background;
    scrollbar-background-hover: $background;
    scrollbar-background-active: $background;
}

#prompt { height: auto; display: none; background: $panel; }
#prompt Horizontal { height: 1; }
#prompt-label { color: $background; background: $primary; text-style: bold; margin-right: 1; }
#prompt-input { width: 1fr; background: $panel; border: none; padding: 0; }
#prompt-hint { height: auto; max-height: 4; padding: 0 1; color: $muted; background: $panel; }
#prompt-hint.problem { color: $error; }

ModalScreen { align: center middle; background: $background 60%; }
.dialog {
    width: auto; min-width: 40; max-width: 90%; height: auto; max-height: 90%;
    background: $panel; border: round $faint; padding: 0 1;
}
.dialog, .dialog OptionList, .dialog SelectionList {
    scrollbar-size: 1 1;
    scrollbar-color: $faint;
    scrollbar-background: $panel;
    scrollbar-background-hover: $panel;
    scrollbar-background-active: $panel;
}
.dialog.wide { width: 78; }
.dialog-title { color: $primary; text-style: bold; margin: 1 0 0 0; }
.dialog OptionList, .dialog SelectionList {
    width: auto; max-width: 100%; height: auto; max-height: 18;
    background: $panel; border: none; padding: 0; margin: 1 0;
}
.dialog OptionList:focus, .dialog SelectionList:focus { background-tint: $panel; }
Footer { background: $surface; }
"""
